"""The symmetric heap: write into the next rank's memory, signal it, read what the previous rank wrote.

    python examples/01_heap.py
    torchrun --nproc-per-node 4 examples/01_heap.py
    mpirun -n 4 python examples/01_heap.py
"""

import torch

import symmcomm

COUNT = 1000


def main() -> None:
    with symmcomm.init() as comm:
        following, previous = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

        # Collective: the tensor lies at the same offset of every rank's heap, and the handle reaches all copies.
        mailbox = comm.empty(COUNT, dtype=torch.float32)
        handle = comm.rendezvous(mailbox)

        # The next rank's copy is a tensor like any other. What is written before a signal is seen after it.
        handle.get_buffer(following, (COUNT,), torch.float32).fill_(comm.rank)
        handle.put_signal(following, channel=0)
        handle.wait_signal(previous, channel=0)
        assert mailbox.eq(previous).all()
        print(f"rank {comm.rank} of {comm.world_size} got {mailbox[0]:.0f} from rank {previous}", flush=True)

        # A barrier on the handle: now everybody has read its mailbox, and it may be given back.
        handle.barrier()
        comm.free(mailbox)


if __name__ == "__main__":
    main()
