"""All-reduce of an ordinary and of a symmetric tensor.

    python examples/02_all_reduce.py
    torchrun --nproc-per-node 4 examples/02_all_reduce.py
    mpirun -n 4 python examples/02_all_reduce.py
"""

import torch

import symmcomm


def main() -> None:
    comm = symmcomm.init()  # finds the ranks of torchrun or mpirun; without either, this process is alone
    ranks = range(comm.world_size)

    # An ordinary tensor passes through staging buffers, in chunks.
    gradient = torch.full((1_000_000,), comm.rank + 1.0)
    comm.all_reduce(gradient, op="avg")
    assert gradient.eq(sum(rank + 1 for rank in ranks) / comm.world_size).all()

    # A symmetric tensor is reduced where it lies: nothing is copied. bfloat16 accumulates in float32.
    largest = comm.empty(1_000_000, dtype=torch.bfloat16).fill_(comm.rank)
    comm.all_reduce(largest, op="max")
    assert largest.eq(comm.world_size - 1).all()

    who = f"rank {comm.rank} of {comm.world_size} ({comm.bootstrap_name})"
    print(f"{who}: average {gradient[0]:g}, largest {largest[0]:g}", flush=True)
    comm.close()


if __name__ == "__main__":
    main()
