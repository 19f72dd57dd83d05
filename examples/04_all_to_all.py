"""Uneven all-to-all, as in expert parallelism: each rank sends every token to the rank that owns the token's expert.

    python examples/04_all_to_all.py
    torchrun --nproc-per-node 4 examples/04_all_to_all.py
    mpirun -n 4 python examples/04_all_to_all.py
"""

import torch

import symmcomm

NUM_TOKENS, HIDDEN = 1000, 64


def main() -> None:
    with symmcomm.init() as comm:
        generator = torch.Generator().manual_seed(comm.rank)
        tokens = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
        owner = torch.randint(comm.world_size, (NUM_TOKENS,), generator=generator)

        # Tokens of one owner together; how many go where, and, by an even exchange, how many come from where.
        order = owner.argsort(stable=True)
        sends = owner.bincount(minlength=comm.world_size)
        takes = torch.empty_like(sends)
        comm.all_to_all_single(takes, sends)

        received = torch.empty(int(takes.sum()), HIDDEN, dtype=tokens.dtype)
        comm.all_to_all_single(received, tokens[order], takes.tolist(), sends.tolist())

        results = received * 2  # the experts' work

        # Back the same way: what was sent is now received.
        returned = torch.empty_like(tokens)
        comm.all_to_all_single(returned, results, sends.tolist(), takes.tolist())
        tokens_after = torch.empty_like(tokens)
        tokens_after[order] = returned
        assert tokens_after.equal(tokens * 2)
        print(f"rank {comm.rank} of {comm.world_size} worked on {len(received)} tokens", flush=True)


if __name__ == "__main__":
    main()
