"""All-reduce on GPUs: of ordinary and symmetric tensors, and in a CUDA graph. Needs an NVIDIA GPU for each rank, or
SYMMCOMM_SHARE_GPU=1.

    torchrun --nproc-per-node 4 examples/07_gpu_all_reduce.py
    mpirun -n 4 python examples/07_gpu_all_reduce.py
"""

import torch

import symmcomm
from symmcomm.env import Launch


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this example needs an NVIDIA GPU: torch finds none here")
    torch.cuda.set_device((Launch.from_env().local_rank or 0) % torch.cuda.device_count())
    comm = symmcomm.init(device="cuda")
    expected = comm.world_size * (comm.world_size + 1) / 2

    # Enqueued on torch's current stream, as any operation of torch.
    gradient = torch.full((1_000_000,), comm.rank + 1.0, device="cuda")
    comm.all_reduce(gradient)
    assert gradient.eq(expected).all()

    # A symmetric tensor is reduced where it lies, whatever its size.
    weights = comm.empty(8 << 20, dtype=torch.bfloat16, device="cuda")
    comm.all_reduce(weights.fill_(comm.rank + 1))
    assert weights.eq(expected).all()

    # The same kernels in a graph: epochs live on the GPU, so it can be replayed.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights.fill_(comm.rank + 1)
        comm.all_reduce(weights)
    for _ in range(3):
        graph.replay()
    assert weights.eq(expected).all()

    print(f"rank {comm.rank} of {comm.world_size} on {torch.cuda.get_device_name()}: {weights[0]:g}", flush=True)
    comm.close()


if __name__ == "__main__":
    main()
