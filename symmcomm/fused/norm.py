"""RMSNorm, and collectives with RMSNorm inside.

    normalised, residual = all_reduce_rms_norm(comm, partial_sums, residual, weight, 1e-5)

For a row x, summed over the ranks, with its residual r and the weight w::

    new residual = round(round(x) + r)           to the bit what all_reduce, then an addition give
    t = x + r                                    in float32, not rounded
    normalised = round(t / √(mean(t²) + eps) · (w + weight_bias) + bias)

All functions take float32, float16 or bfloat16; sums and norms are in float32. Their common arguments:

    input: (..., hidden), hidden from 1 to 32768; dimensions before the last are rows, any number of them.
    residual: like ``input``, or None for none; then the second result is the sum (or ``input``) itself. Its rows may
        lie apart (a slice of a wider tensor).
    weight: (hidden,), contiguous, of the dtype of ``input``.
    eps: added to the mean of the squares.
    bias: (hidden,), as ``weight``.
    weight_bias: 1.0 for Gemma's 1 + w.
    out: takes the normalised rows, by default a new tensor. Rows may lie apart. It may be ``input`` or ``residual``.
    new_residual: takes the new residual, by default a new tensor; it may be ``residual`` or ``input``.
    scales: float32, one a row. Then the normalised rows are float8_e4m3fn, each divided by its scale, the row's largest
        magnitude / 448 (1 for a row of zeros), which goes here.

    launch_with_pdl: on a GPU from sm_90 up, the kernel may start beside the one before it in the stream (programmatic
        dependent launch) and waits there for its end; ``weight`` and ``bias`` must be older than that one. Of kernels
        with peers only those without signals do, where ranks have a GPU each. Not beside another communicator's
        kernels: what waits takes places that those may need.

What is sharded lies in slices of ⌈rows / world_size⌉ rows (``row_slice``), the last ones shorter or empty, as
``torch.chunk`` cuts. Ranks must agree on rows, hidden, dtype and whether there are scales; MismatchError otherwise, on
all. A wrong argument raises ArgumentError or DTypeError on the calling rank. No gradients.

On GPU tensors the calls go to the communicator's GPU side (``init(device=)``): they enqueue kernels on torch's current
stream, can be captured in a CUDA graph once they have been called like that before, and do not compare what ranks pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from symmcomm.collectives.arguments import check_whole
from symmcomm.collectives.call import Kind, encode_norm
from symmcomm.errors import ArgumentError
from symmcomm.fused import norm_cpu
from symmcomm.fused.call import Call, Heads, check_numbers, check_same
from symmcomm.fused.norm_again import all_reduce_again, remember
from symmcomm.fused.rows import check_input, check_like
from symmcomm.memory.handle import SymmetricHandle
from symmcomm.schedule.select_norm import MAX_CTAS

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator

Pair = tuple[torch.Tensor, torch.Tensor]

_FORMS = (
    Kind.all_reduce_rms_norm,
    Kind.reduce_scatter_rms_norm_all_gather,
    Kind.reduce_scatter_rms_norm,
    Kind.rms_norm_all_gather,
)
"""In the order of ``kernels.cpu.fused_norm``."""


def _run(comm: Communicator, call: Call, kind: Kind, max_ctas: int = MAX_CTAS) -> None:
    call.check_aliases()
    if call.input.is_cuda:
        from symmcomm.fused import norm_gpu  # needs CuTe DSL, as a communicator's GPU side does

        gpu = comm.gpu_on(call.device, "input")
        if kind is Kind.all_reduce_rms_norm:
            norm_gpu.all_reduce(gpu, call)
        elif kind is Kind.reduce_scatter_rms_norm:
            norm_gpu.reduce_scatter(gpu, call, max_ctas)
        else:
            norm_gpu.gather(gpu, call, max_ctas, kind is Kind.reduce_scatter_rms_norm_all_gather)
        return
    task = call.task
    word = encode_norm(kind, task.dtype, task.hidden, task.scaled)
    norm_cpu.fused_norm(comm, task, word, _FORMS.index(kind))
    if kind is Kind.all_reduce_rms_norm:
        remember(task, call.shape, word)


def _run_alone(call: Call) -> None:
    call.check_aliases()
    if call.input.is_cuda:
        from symmcomm.fused import norm_gpu

        norm_gpu.norm_rows(call)
    else:
        norm_cpu.norm_rows(call.task)


def rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> torch.Tensor:
    """The normalised rows of ``input``, which may lie apart. No communication."""
    call = Call(input, weight, bias, eps, weight_bias, launch_with_pdl)
    out = call.add_out(out, call.shape, scales)
    _run_alone(call)
    return out


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> Pair:
    """(normalised, new residual) of ``input + residual``, whose rows may lie apart. No communication."""
    call = Call(input, weight, bias, eps, weight_bias, launch_with_pdl)
    call.add_residual(residual, call.shape)
    new_residual = call.add_new_residual(new_residual, call.shape)
    out = call.add_out(out, call.shape, scales)
    _run_alone(call)
    return out, new_residual


def qk_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    *,
    weight_bias: float = 0.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> Pair:
    """Each head of q and of k normalised over its head_dim: (q, k). No communication.

    Args:
        q, k: (..., heads, head_dim), with numbers of heads of their own; slices of one tensor are fine.
        q_weight, k_weight: (head_dim,).
        q_out, k_out: like ``q`` and ``k``, which they may be; by default new tensors.
        launch_with_pdl: as above; of the weights.
    """
    check_same(check_input(k, "k"), "k", check_input(q, "q"), "q")
    eps, weight_bias = check_numbers(eps, weight_bias)
    one = Heads("q", q, q_weight, q_out, eps, weight_bias)
    other = Heads("k", k, k_weight, k_out, eps, weight_bias)
    one.check_aliases(other)
    other.check_aliases(one)
    if q.is_cuda:
        from symmcomm.fused import norm_gpu

        norm_gpu.qk_norm(one, other, launch_with_pdl)
    else:
        for heads in (one, other):
            norm_cpu.norm_rows(heads.task, heads.tokens.num, heads.tokens.pitch, heads.out_tokens.pitch)
    return one.out, other.out


def all_reduce_rms_norm(
    comm: Communicator,
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> Pair:
    """(normalised, new residual) of the sum of all ranks' inputs: all rows, the same bits on every rank.

    Args:
        input: contiguous; this rank's contribution to all rows.
        residual: all rows, the same on every rank.
    """
    if residual is not None and bias is None and scales is None:
        found = all_reduce_again(comm, input, residual, weight, eps, weight_bias, out, new_residual)
        if found is not None:
            return found
    call = Call(input, weight, bias, eps, weight_bias, launch_with_pdl)
    call.require_dense_input()
    call.add_residual(residual, call.shape)
    new_residual = call.add_new_residual(new_residual, call.shape)
    out = call.add_out(out, call.shape, scales)
    _run(comm, call, Kind.all_reduce_rms_norm)
    return out, new_residual


def reduce_scatter_rms_norm_all_gather(
    comm: Communicator,
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    max_ctas: int = MAX_CTAS,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> Pair:
    """As ``all_reduce_rms_norm``, but the residual stays sharded by rows. TokenWeave's fused kernel.

    Args:
        input: contiguous; this rank's contribution to all rows. Symmetric, and as ``out`` too, nothing is staged.
        residual: (own rows, hidden).
        max_ctas: the most CTAs of a GPU that any kernel of the call takes, 1 to 64, so that a matrix product runs
            beside it; torch's copies excepted, where rows are not a multiple of the ranks or ``out`` has gaps, and the
            reduce-scatter of rows that no one kernel norms (more than eight ranks; float32 rows of more than 16384
            elements between five and more).

    Returns:
        All rows normalised, and this rank's rows of the new residual.
    """
    _check_ctas(max_ctas)
    call = Call(input, weight, bias, eps, weight_bias, launch_with_pdl)
    call.require_dense_input()
    own = call.shard(comm.rank, comm.world_size, "residual")
    call.add_residual(residual, own)
    new_residual = call.add_new_residual(new_residual, own)
    out = call.add_out(out, call.shape, scales)
    _run(comm, call, Kind.reduce_scatter_rms_norm_all_gather, max_ctas)
    return out, new_residual


def reduce_scatter_rms_norm(
    comm: Communicator,
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    max_ctas: int = MAX_CTAS,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> Pair:
    """(normalised, new residual) of this rank's rows of the sum of all ranks' inputs (sequence parallel).

    Args:
        input: contiguous; this rank's contribution to all rows.
        residual, out, new_residual: (own rows, hidden). ``out`` may be this rank's rows of ``input``.
        max_ctas: as for ``reduce_scatter_rms_norm_all_gather``.
    """
    _check_ctas(max_ctas)
    call = Call(input, weight, bias, eps, weight_bias, launch_with_pdl)
    call.require_dense_input()
    own = call.shard(comm.rank, comm.world_size, "residual", "out")
    call.add_residual(residual, own)
    new_residual = call.add_new_residual(new_residual, own)
    out = call.add_out(out, own, scales)
    _run(comm, call, Kind.reduce_scatter_rms_norm, max_ctas)
    return out, new_residual


def rms_norm_all_gather(
    comm: Communicator,
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    rows: int | None = None,
    max_ctas: int = MAX_CTAS,
    bias: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    out: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> Pair:
    """All ranks' rows normalised, and this rank's rows of the new residual (without ``residual`` the input itself).

    Args:
        input: (own rows, hidden); rows may lie apart.
        residual, new_residual: as ``input``.
        rows: of all ranks together; by default world_size times this rank's.
        out: (rows, hidden).
        max_ctas: as for ``reduce_scatter_rms_norm_all_gather``.
    """
    _check_ctas(max_ctas)
    call = Call(input, weight, bias, eps, weight_bias, launch_with_pdl)
    num = call.task.rows
    call.task.rows = num * comm.world_size if rows is None else _check_rows(rows)
    own = call.shard(comm.rank, comm.world_size, "input", "residual")
    if own[0] != num:
        raise ArgumentError(f"input has {num} rows; of rows={rows} rank {comm.rank} has {own[0]}")
    call.add_residual(residual, call.shape)
    if residual is not None:
        new_residual = call.add_new_residual(new_residual, call.shape)
    elif new_residual is not None:
        raise ArgumentError("new_residual is given, residual is not: the new residual is the input")
    out = call.add_out(out, torch.Size((call.task.rows, call.task.hidden)), scales)
    _run(comm, call, Kind.rms_norm_all_gather, max_ctas)
    return out, input if new_residual is None else new_residual


def fused_rs_ln_ag_cta(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    symm_mem_hdl: SymmetricHandle,
    rank: int,
    world_size: int,
    MAX_CTAs: int,
    offset: int,
    variance_epsilon: float,
) -> Pair:
    """``reduce_scatter_rms_norm_all_gather`` in place, with the name and the arguments of TokenWeave (the function in
    its ``layernorm.py``), but for any dtype, world size and device of the other.

    Args:
        x: (rows of a rank, hidden): this rank's rows in a symmetric tensor of ``world_size`` times as many; the ranks'
            contributions are there, and the normalised rows of all take their place.
        residual: (rows of a rank, hidden); becomes the new residual.
        symm_mem_hdl: of the symmetric tensor, from ``Communicator.rendezvous``.
        rank, world_size: those of the handle.
        MAX_CTAs: 1 to 64.
        offset: bytes from the start of the symmetric tensor to ``x``.

    Returns:
        x, residual.
    """
    if (rank, world_size) != (symm_mem_hdl.rank, symm_mem_hdl.world_size):
        raise ArgumentError(
            f"rank={rank} of {world_size}, symm_mem_hdl has rank {symm_mem_hdl.rank} of {symm_mem_hdl.world_size}"
        )
    check_input(x, "x")
    check_whole(offset, "offset")
    first = offset - rank * x.nbytes
    room = symm_mem_hdl.buffer_size - world_size * x.nbytes
    if x.data_ptr() != symm_mem_hdl.buffer_ptrs[rank] + offset or not 0 <= first <= room or not x.is_contiguous():
        raise ArgumentError(
            f"x must be rank {rank}'s rows of a contiguous batch in the symmetric tensor: x is at {x.data_ptr()}, "
            f"offset={offset} is at {symm_mem_hdl.buffer_ptrs[rank] + offset}, the batch from byte {first} to "
            f"{first + world_size * x.nbytes} of {symm_mem_hdl.buffer_size}"
        )
    check_like(residual, "residual", x.shape, x.dtype, x.device)
    num, hidden = x.numel() // x.shape[-1], x.shape[-1]
    start = x.storage_offset() - rank * x.numel()
    batch = x.as_strided((world_size * num, hidden), (hidden, 1), start)
    flat = residual.view(num, hidden)
    comm = _communicator_of(symm_mem_hdl)
    _check_ctas(MAX_CTAs)
    call = Call(batch, weight, None, variance_epsilon, 0.0)
    own = call.shard(rank, world_size, "residual")
    call.add_residual(flat, own)
    call.add_new_residual(flat, own)
    call.add_out(batch, call.shape, None)
    if x.is_cuda:
        call.batch_offset = comm.gpu_on(x.device, "x").offset_of(batch)
    _run(comm, call, Kind.reduce_scatter_rms_norm_all_gather, MAX_CTAs)
    return x, residual


def _communicator_of(handle: SymmetricHandle) -> Communicator:
    side: Any = handle._side
    comm: Communicator = getattr(side, "comm", side)
    return comm


def _check_ctas(max_ctas: int) -> None:
    check_whole(max_ctas, "max_ctas")
    if not 1 <= max_ctas <= MAX_CTAS:
        raise ArgumentError(f"max_ctas={max_ctas} is not in 1..{MAX_CTAS}")


def _check_rows(rows: int) -> int:
    check_whole(rows, "rows")
    if rows < 0:
        raise ArgumentError(f"rows={rows} is negative")
    return rows
