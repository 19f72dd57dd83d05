"""Bad arguments: the calling rank gets an error that names the argument and both values, nothing is communicated, and
the communicator goes on working."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import symmcomm
from symmcomm import ArgumentError, Communicator, DTypeError, MismatchError, Settings, SymmCommError
from symmcomm.testing.spawn import run_ranks

W = 3  # ranks, in all cases
F, LONG = torch.ones(6), torch.ones(9)
Call = Callable[[Communicator], object]


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP leaves a parameter that it has resharded."""
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(count: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(count)


# What is wrong with a tensor, whichever call gets it: name, tensor, words of the error.
BAD_TENSORS: list[tuple[object, str]] = [
    ([1.0, 2.0], r"must be a torch.Tensor, got list"),
    (None, r"must be a torch.Tensor, got NoneType"),
    (torch.ones(6, 4).t(), r"must be contiguous: shape \(4, 6\) has strides \(1, 4\)"),
    (torch.ones(12)[::2], r"must be contiguous: shape \(6,\) has strides \(2,\)"),
    (torch.ones(1).expand(6), r"must be contiguous: shape \(6,\) has strides \(0,\)"),
    (torch.ones(6, device="meta"), r"must be on device cpu, it is on meta"),
    (torch.ones(6).to_sparse(), r"must be dense \(torch.strided\), its layout is torch.sparse_coo"),
    (torch._neg_view(torch.ones(6)), r"is a lazy conjugate or negative view"),
    (torch.ones(6, 1).to_mkldnn(), r"must be dense \(torch.strided\), its layout is torch._mkldnn"),
    (without_memory(torch.ones(6)), r"of shape \(6,\) has no memory"),
    (fake(6), r"of shape \(6,\) has no memory"),
]

CALLS_ON_A_TENSOR: dict[str, Callable[[Communicator, object], object]] = {
    "tensor of all_reduce": lambda comm, bad: comm.all_reduce(bad),
    "tensor of reduce": lambda comm, bad: comm.reduce(bad, 0),
    "output of reduce_scatter": lambda comm, bad: comm.reduce_scatter_tensor(bad, torch.ones(18)),
    "input of reduce_scatter": lambda comm, bad: comm.reduce_scatter_tensor(torch.ones(2), bad),
    "output of all_gather": lambda comm, bad: comm.all_gather_into_tensor(bad, torch.ones(2)),
    "input of all_gather": lambda comm, bad: comm.all_gather_into_tensor(torch.ones(18), bad),
    "output of all_to_all": lambda comm, bad: comm.all_to_all_single(bad, F),
    "input of all_to_all": lambda comm, bad: comm.all_to_all_single(torch.ones(6), bad),
    "output of uneven all_to_all": lambda comm, bad: comm.all_to_all_single(bad, F, [1, 2, 3], [3, 2, 1]),
    "input of uneven all_to_all": lambda comm, bad: comm.all_to_all_single(torch.ones(6), bad, [1, 2, 3], [3, 2, 1]),
    "tensor of broadcast": lambda comm, bad: comm.broadcast(bad, 0),
    "tensor of gather": lambda comm, bad: comm.gather(bad, [F, F, F], 0),
    "gather_list[1] of gather": lambda comm, bad: comm.gather(F, [F, bad, F], 0),
    "tensor of scatter": lambda comm, bad: comm.scatter(bad, [F, F, F], 0),
    "scatter_list[2] of scatter": lambda comm, bad: comm.scatter(F, [F, F, bad], 0),
    "tensor of send": lambda comm, bad: comm.send(bad, 1),
    "tensor of recv": lambda comm, bad: comm.recv(bad, 1),
    "tensor of rendezvous": lambda comm, bad: comm.rendezvous(bad),
}  # fmt: skip

# Everything else: call on rank 0, error, words.
BAD_CALLS: dict[str, tuple[Call, type[SymmCommError], str]] = {
    # Operations.
    "unknown op": (lambda comm: comm.all_reduce(F, "mean"), ArgumentError, r"op='mean' is not a reduction; known are"),
    "op None": (lambda comm: comm.all_reduce(F, None), ArgumentError, r"op=None is not a reduction"),
    "op 3.5": (lambda comm: comm.all_reduce(F, 3.5), ArgumentError, r"op=3.5 is not a reduction"),
    "op of a list": (lambda comm: comm.all_reduce(F, ["sum"]), ArgumentError, r"op=\['sum'\] is not a reduction"),
    "op of a list in reduce": (lambda comm: comm.reduce(F, 0, ["sum"]), ArgumentError, r"op=\['sum'\] is not a"),
    "op of a list in reduce_scatter": (
        lambda comm: comm.reduce_scatter_tensor(torch.ones(2), F, ["sum"]), ArgumentError,
        r"op=\['sum'\] is not a reduction",
    ),
    "premultiplied sum": (
        lambda comm: comm.all_reduce(F, dist._make_nccl_premul_sum(2.0)), ArgumentError, r"op=.* is not a reduction",
    ),
    "op that floats lack": (lambda comm: comm.all_reduce(F, "bxor"), DTypeError, r"op=bxor .* dtype torch.float32"),
    "torch's op that floats lack": (
        lambda comm: comm.reduce(F, 0, dist.ReduceOp.BAND), DTypeError,
        r"op=band is not defined for dtype torch.float32",
    ),
    "average of bool": (
        lambda comm: comm.all_reduce(F.bool(), "avg"), DTypeError, r"op=avg is not defined for dtype torch.bool",
    ),
    "sum of complex": (
        lambda comm: comm.all_reduce(F.to(torch.complex64)), DTypeError,
        r"torch.complex64 cannot be reduced; supported are",
    ),
    "sum of uint16": (lambda comm: comm.reduce(F.to(torch.uint16), 0), DTypeError, r"torch.uint16 cannot be reduced"),
    # Pairs of tensors.
    "dtypes of reduce_scatter": (
        lambda comm: comm.reduce_scatter_tensor(torch.ones(2), torch.ones(6, dtype=torch.float64)), DTypeError,
        r"output and input must have one dtype, got torch.float32 and torch.float64",
    ),
    "sizes of reduce_scatter": (
        lambda comm: comm.reduce_scatter_tensor(torch.ones(2), torch.ones(7)), ArgumentError,
        r"output has 2 elements \(shape \(2,\)\), input 7 \(shape \(7,\)\): expected 1 of output to 3 of input",
    ),
    "dtypes of all_gather": (
        lambda comm: comm.all_gather_into_tensor(torch.ones(18), F.int()), DTypeError,
        r"output and input must have one dtype, got torch.float32 and torch.int32",
    ),
    "sizes of all_gather": (
        lambda comm: comm.all_gather_into_tensor(torch.ones(6), F), ArgumentError,
        r"output has 6 elements .* input 6 .* expected 3 of output to 1 of input",
    ),
    "dtypes of all_to_all": (
        lambda comm: comm.all_to_all_single(F.int(), F), DTypeError, r"got torch.int32 and torch.float32",
    ),
    "dtypes of uneven all_to_all": (
        lambda comm: comm.all_to_all_single(F.int(), F, [1, 2, 3], [3, 2, 1]), DTypeError,
        r"got torch.int32 and torch.float32",
    ),
    "sizes of all_to_all": (
        lambda comm: comm.all_to_all_single(torch.ones(3), F), ArgumentError, r"output has 3 elements .* input 6",
    ),
    "indivisible all_to_all": (
        lambda comm: comm.all_to_all_single(torch.ones(7), torch.ones(7)), ArgumentError,
        r"input has 7 elements, which world_size=3 does not divide",
    ),
    # Splits.
    "number of splits": (
        lambda comm: comm.all_to_all_single(torch.ones(6), F, [3, 3], [2, 2, 2]), ArgumentError,
        r"output_split_sizes has 2 entries, world_size is 3",
    ),
    "sum of input splits": (
        lambda comm: comm.all_to_all_single(torch.ones(6), F, [1, 2, 3], [1, 2, 4]), ArgumentError,
        r"input_split_sizes=\[1, 2, 4\] add up to 7, input has 6 rows",
    ),
    "sum of output splits": (
        lambda comm: comm.all_to_all_single(torch.ones(6), F, [1, 1, 1], [1, 2, 3]), ArgumentError,
        r"output_split_sizes=\[1, 1, 1\] add up to 3, output has 6 rows",
    ),
    "negative split": (
        lambda comm: comm.all_to_all_single(torch.ones(6), F, [7, 0, -1], [1, 2, 3]), ArgumentError,
        r"output_split_sizes=\[7, 0, -1\] has a negative entry",
    ),
    "fractional split": (
        lambda comm: comm.all_to_all_single(torch.ones(6), F, [1, 2, 3], [1.5, 2.5, 2]), ArgumentError,
        r"input_split_sizes=\[1.5, 2.5, 2\] has an entry that is not",
    ),
    "splits of words": (
        lambda comm: comm.all_to_all_single(torch.ones(6), F, [1, 2, 3], ["a", "b", "c"]), ArgumentError,
        r"input_split_sizes=\['a', 'b', 'c'\] has an entry that is not",
    ),
    "splits as one number": (
        lambda comm: comm.all_to_all_single(torch.ones(6), F, [1, 2, 3], 2), ArgumentError, r"input_split_sizes",
    ),
    "rows that do not divide": (
        lambda comm: comm.all_to_all_single(torch.ones(7), F, None, [1, 2, 3]), ArgumentError,
        r"output has 7 rows, which world_size=3 does not divide",
    ),
    "overlap with splits": (
        lambda comm: comm.all_to_all_single(F, F, [1, 2, 3], [1, 2, 3]), ArgumentError, r"output and input overlap",
    ),
    "partial overlap with splits": (
        lambda comm: comm.all_to_all_single(LONG[3:], LONG[:6], [1, 2, 3], [1, 2, 3]), ArgumentError,
        r"output and input overlap",
    ),
    "partial overlap": (
        lambda comm: comm.all_to_all_single(LONG[3:], LONG[:6]), ArgumentError, r"output and input overlap",
    ),
    "splits in a tensor": (
        lambda comm: comm.all_to_all_single(torch.ones(6), F, torch.tensor([1, 2, 3]), None), ArgumentError,
        r"output_split_sizes=tensor\(\[1, 2, 3\]\) is not a sequence of whole numbers",
    ),
    # One inside the other, but not where it belongs.
    "input of all_gather in another rank's part": (
        lambda comm: comm.all_gather_into_tensor(LONG, LONG[3:6]), ArgumentError,
        r"input begins 12 bytes into output: there it may only be part 0 of it, at 0",
    ),
    "input of all_gather across the end": (
        lambda comm: comm.all_gather_into_tensor(LONG[1:7], LONG[:2]), ArgumentError,
        r"input begins -4 bytes into output",
    ),
    "output of reduce_scatter in another rank's part": (
        lambda comm: comm.reduce_scatter_tensor(LONG[6:], LONG), ArgumentError,
        r"output begins 24 bytes into input: there it may only be part 0 of it, at 0",
    ),
    "output of a ring in another rank's part": (
        lambda comm: comm.reduce_scatter_tensor(LONG[1:4], LONG, ring_mode=symmcomm.RingMode.Ring1D), ArgumentError,
        r"output begins 4 bytes into input",
    ),
    # Roots, lists, peers.
    "root too large": (
        lambda comm: comm.broadcast(F, 3), ArgumentError, r"src=3 is not a rank of this communicator \(0..2\)",
    ),
    "root negative": (
        lambda comm: comm.reduce(F, -1), ArgumentError, r"dst=-1 is not a rank of this communicator \(0..2\)",
    ),
    "root a word": (lambda comm: comm.gather(F, [F] * W, "0"), ArgumentError, r"dst='0' is not a rank"),
    "root a bool": (lambda comm: comm.scatter(F, [F] * W, True), ArgumentError, r"src=True is not a rank"),
    "root a fraction": (lambda comm: comm.broadcast(F, 1.0), ArgumentError, r"src=1.0 is not a rank"),
    "no gather_list": (
        lambda comm: comm.gather(F, None, 0), ArgumentError, r"gather_list must have 3 tensors on the root 0, got None",
    ),
    "short gather_list": (
        lambda comm: comm.gather(F, [F, F], 0), ArgumentError,
        r"gather_list must have 3 tensors on the root 0, got 2 tensors",
    ),
    "list where no root is": (
        lambda comm: comm.gather(F, [F] * W, 1), ArgumentError,
        r"gather_list must be None on rank 0, .* not the root 1",
    ),
    "dtype in gather_list": (
        lambda comm: comm.gather(F, [F, F.int(), F], 0), DTypeError,
        r"gather_list\[1\] and tensor must have one dtype, got torch.int32 and torch.float32",
    ),
    "size in scatter_list": (
        lambda comm: comm.scatter(F, [F, F, torch.ones(7)], 0), ArgumentError,
        r"scatter_list\[2\] has 7 elements, tensor has 6",
    ),
    "no scatter_list": (
        lambda comm: comm.scatter(F, [], 0), ArgumentError,
        r"scatter_list must have 3 tensors on the root 0, got 0 tensors",
    ),
    "send to itself": (lambda comm: comm.send(F, 0), ArgumentError, r"dst=0 is the calling rank itself"),
    "receive from itself": (lambda comm: comm.recv(F, 0), ArgumentError, r"src=0 is the calling rank itself"),
    "send beyond the world": (lambda comm: comm.send(F, 9), ArgumentError, r"dst=9 is not a rank .* \(0..2\)"),
    "receive from below": (lambda comm: comm.recv(F, -1), ArgumentError, r"src=-1 is not a rank .* \(0..2\)"),
    # The rest.
    "algorithm": (
        lambda comm: comm.barrier(algorithm="tree"), ArgumentError, r"algorithm='tree' is none of 'all_to_all', 'ring'",
    ),
    "protocol": (
        lambda comm: comm.barrier(protocol="mutex"), ArgumentError, r"protocol='mutex' is none of 'epoch', 'cas'",
    ),
    "time-out of zero": (lambda comm: comm.barrier(timeout_s=0), ArgumentError, r"timeout_s=0 is not positive"),
    "time-out of NaN": (
        lambda comm: comm.barrier(timeout_s=float("nan")), ArgumentError, r"timeout_s=nan is not positive",
    ),
    "time-out of a word": (lambda comm: comm.barrier(timeout_s="3"), ArgumentError, r"timeout_s='3' is not positive"),
    "device of empty": (lambda comm: comm.empty(3, device="chip"), ArgumentError, r"device='chip' is not a device"),
    "device of init": (lambda comm: symmcomm.init(device=2.5), ArgumentError, r"device=2.5 is not a device"),
    "topology of init": (lambda comm: symmcomm.init(topology="2x4"), ArgumentError, r"='2x4' is not a Topology"),
    "whether a number is symmetric": (lambda comm: comm.is_symmetric(3), ArgumentError, r"a torch.Tensor, got int"),
    "size of bool": (lambda comm: comm.empty(True), ArgumentError, r"size=\(True,\) has an entry that is not"),
    "negative size": (
        lambda comm: comm.empty(3, -1), ArgumentError, r"size=\(3, -1\) has an entry that is not a whole number",
    ),
    "fractional size": (
        lambda comm: comm.empty(2.5), ArgumentError, r"size=\(2.5,\) has an entry that is not a whole number",
    ),
    "size of words": (lambda comm: comm.empty("23"), ArgumentError, r"size="),
    "dtype of a word": (lambda comm: comm.empty(2, dtype="float32"), (ArgumentError, DTypeError), r"dtype='float32'"),
    "free what is not symmetric": (lambda comm: comm.free(torch.ones(3)), ArgumentError, r"tensor is not symmetric"),
    "free a list": (lambda comm: comm.free([1]), ArgumentError, r"tensor must be a torch.Tensor, got list"),
    "free a sparse tensor": (lambda comm: comm.free(torch.ones(3).to_sparse()), ArgumentError, r"tensor must be dense"),
    "rendezvous of what is not symmetric": (lambda comm: comm.rendezvous(F), ArgumentError, r"tensor is not symmetric"),
    "color": (lambda comm: comm.split("red"), ArgumentError, r"color='red' is not a whole number"),
    "key": (lambda comm: comm.split(0, key="first"), ArgumentError, r"key='first' is not a whole number"),
    "payload": (lambda comm: comm.all_gather_bytes("text"), ArgumentError, r"payload must be bytes, got str"),
}  # fmt: skip


def check(what: str, call: Callable[[], object], kind: type[SymmCommError], words: str) -> str | None:
    """The case and what happened instead, if that is not as it should be."""
    try:
        call()
    except kind as error:
        return None if re.search(words, str(error)) else f"{what}: {error}"
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}"
    return f"{what}: no error"


def call_well(comm: Communicator) -> None:
    """The good forms of the calls below."""
    long, third = torch.ones(6 * W), torch.ones(2)
    comm.free(comm.empty(np.int64(3), torch.tensor(2)))  # whole numbers, whoever made them
    comm.all_reduce(F.clone())
    comm.all_reduce(F.int(), "bxor")
    comm.reduce_scatter_tensor(third, F)
    comm.all_gather_into_tensor(long, F)
    comm.all_to_all_single(torch.ones(6), F)
    for root in range(W):
        comm.reduce(F.clone(), root)
        comm.broadcast(F.clone(), root)
        comm.gather(F, [torch.ones(6) for _ in range(W)] if comm.rank == root else None, root)
        comm.scatter(torch.ones(6), [F] * W if comm.rank == root else None, root)


def make_bad_calls() -> None:
    """Rank 0 errs, again and again; afterwards all ranks still agree."""
    wrong: list[str | None] = []
    with symmcomm.init() as comm:
        call_well(comm)  # some checks could be thought to be needed on the first call only
        if comm.rank == 0:
            for what, call in CALLS_ON_A_TENSOR.items():
                for bad, words in BAD_TENSORS:
                    words = f"{re.escape(what.split()[0])} {words}"
                    wrong.append(check(what, lambda call=call, bad=bad: call(comm, bad), ArgumentError, words))
            for what, (call, kind, words) in BAD_CALLS.items():
                wrong.append(check(what, lambda call=call: call(comm), kind, words))
            assert not any(wrong), "\n".join(what for what in wrong if what)
        total = torch.ones(3)
        comm.all_reduce(total)
        comm.barrier(algorithm="ring")
        assert total.tolist() == [3.0] * 3


def test_bad_arguments() -> None:
    run_ranks(make_bad_calls, W)


# Errors are also the built-in ones that a Python user expects.


@pytest.mark.parametrize(("error", "builtin"), [
    (ArgumentError, ValueError), (DTypeError, TypeError), (symmcomm.ClosedError, RuntimeError),
    (symmcomm.PeerTimeoutError, TimeoutError), (symmcomm.PeerDiedError, ConnectionError),
    (symmcomm.OutOfSymmetricMemoryError, MemoryError), (MismatchError, RuntimeError),
])  # fmt: skip
def test_builtin_bases(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, SymmCommError)


# Memory.


def run_out_of_memory() -> None:
    with symmcomm.init() as comm:
        used = comm.empty(1000)
        for size in (64 << 20, 1 << 50):
            words = rf"{size} bytes .*SYMMCOMM_HEAP_MAX_BYTES=67108864"
            with pytest.raises(symmcomm.OutOfSymmetricMemoryError, match=words):
                comm.empty(size, dtype=torch.uint8)
        again = comm.empty(1000).fill_(1)
        comm.all_reduce(again)
        assert again.eq(comm.world_size).all()
        comm.free(used)
        with pytest.raises(ArgumentError, match="is not allocated"):
            comm.free(used)
        comm.barrier()


def test_out_of_memory() -> None:
    run_ranks(run_out_of_memory, 2, env={"SYMMCOMM_HEAP_MAX_BYTES": "64M"})


def init_with_own_staging() -> None:
    symmcomm.init(settings=Settings(staging_bytes=(1 + int(os.environ["RANK"])) << 20))


def test_different_settings_are_named() -> None:
    results = run_ranks(init_with_own_staging, 2, check=False)
    for result in results:
        assert isinstance(result.error, MismatchError), result.report()
        assert "SYMMCOMM_STAGING_BYTES" in str(result.error)
        assert "1048576" in str(result.error)
        assert "2097152" in str(result.error)


def init_in_a_group_without_all() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(ArgumentError, match="group"):
            symmcomm.init(group)
    else:
        with symmcomm.init(group) as comm:
            total = torch.ones(2)
            comm.all_reduce(total)
            assert total.tolist() == [2.0, 2.0]
    dist.barrier()
    dist.destroy_process_group()


def test_group_that_lacks_the_caller() -> None:
    run_ranks(init_in_a_group_without_all, 3)


# Handles.


def bad_arguments_of_a_handle() -> None:
    with symmcomm.init() as comm:
        handle = comm.rendezvous(comm.empty(64, dtype=torch.float32))
        kind = torch.float32
        assert handle.get_buffer(1, (60,), kind, 4).data_ptr() == handle.buffer_ptrs[1] + 16
        assert handle.get_buffer(0, (0,), kind, 64).numel() == 0
        bad: list[tuple[Callable[[], object], str]] = [
            (lambda: handle.get_buffer(2, (1,), kind), r"rank=2 is not a rank of this communicator \(0..1\)"),
            (lambda: handle.get_buffer(0, (8,), kind, -8), "storage_offset=-8 of .* is not within 256 bytes"),
            (lambda: handle.get_buffer(0, (0,), kind, 65), "storage_offset=65 of .* is not within 256 bytes"),
            (lambda: handle.get_buffer(0, (61,), kind, 4), r"sizes=\(61,\) of .* need 244 bytes, 240 are there"),
            (lambda: handle.get_buffer(0, (-1, -2), kind), r"sizes=\(-1, -2\)"),
            (lambda: handle.get_signal_pad(0, storage_offset=-1), "storage_offset=-1"),
            (lambda: handle.put_signal(5), "dst_rank=5 is not a rank"),
            (lambda: handle.wait_signal(-1), "src_rank=-1 is not a rank"),
            (lambda: handle.barrier(timeout_ms=-5), "timeout_ms=-5 is not positive"),
            (lambda: handle.put_signal(0, timeout_ms=-5), "timeout_ms=-5 is not positive"),
            (lambda: handle.barrier(channel=-1), "channel=-1"),
        ]
        for call, words in bad:
            with pytest.raises(ArgumentError, match=words):
                call()


def test_bad_arguments_of_a_handle() -> None:
    run_ranks(bad_arguments_of_a_handle, 2)
