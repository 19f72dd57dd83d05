"""The norm kernel of a shape: what ``schedule.select_norm`` chose, with what is compiled into it.

``aligned`` is ``select_norm.are_aligned`` of this rank's tensors; other ranks' may differ, except for ``direct``.
"""

from __future__ import annotations

from typing import Any

from symmcomm.kernels.gpu.all_reduce_norm import AllReduceNormStaged
from symmcomm.kernels.gpu.all_reduce_norm_lamport import AllReduceNormLamport
from symmcomm.kernels.gpu.norm import QKNorm, RMSNorm
from symmcomm.kernels.gpu.reduce_scatter_norm import ReduceScatterNorm
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.select_norm import Form, HeadLaunch, RowLaunch


def rms_norm(
    shape: RowLaunch, dtype: DType, arch: int, *, aligned: bool, residual: bool = False, bias: bool = False,
    quantize: bool = False, pdl: bool = False,
) -> RMSNorm:  # fmt: skip
    """See ``select_norm.norm_shape``; ``arch`` as in ``sm_<arch>``."""
    return RMSNorm(
        dtype=dtype, arch=arch, threads=shape.threads, rows=shape.rows, vectors=shape.unroll, aligned=aligned,
        residual=residual, bias=bias, quantize=quantize, pdl=pdl,
    )  # fmt: skip


def qk_norm(
    shape: HeadLaunch, dtype: DType, head_dim: int, arch: int, *, aligned: bool, pdl: bool = False
) -> QKNorm:
    """See ``select_norm.qk_norm_shape``."""
    return QKNorm(
        dtype=dtype, arch=arch, head_dim=head_dim, lanes=shape.lanes, vectors=shape.vectors, tokens=shape.tokens,
        warps=shape.warps, aligned=aligned, pdl=pdl,
    )  # fmt: skip


def exchange_norm(
    shape: RowLaunch, dtype: DType, world_size: int, arch: int, *, aligned: bool, scatter: bool = False,
    bias: bool = False, quantize: bool = False, pdl: bool = False,
) -> AllReduceNormLamport | AllReduceNormStaged:  # fmt: skip
    """All-reduce, or with ``scatter`` reduce-scatter, and norm, of any tensors: the Lamport or the staged form."""
    common: dict[str, Any] = {
        "dtype": dtype, "world_size": world_size, "arch": arch, "threads": shape.threads, "vectors": shape.unroll,
        "aligned": aligned, "scatter": scatter, "bias": bias, "quantize": quantize, "pdl": pdl,
    }  # fmt: skip
    if shape.form is Form.lamport:
        return AllReduceNormLamport(**common, cluster=shape.cluster)
    return AllReduceNormStaged(**common, rows=shape.rows, pieces=shape.pieces)


def direct_norm(
    shape: RowLaunch, dtype: DType, world_size: int, arch: int, *, aligned: bool, reduce: bool = True,
    gather: bool = True, residual: bool = True, replicate: bool = False, bias: bool = False, quantize: bool = False,
    multimem: bool = False, pdl: bool = False,
) -> ReduceScatterNorm:  # fmt: skip
    """The kernel on symmetric memory; ``aligned`` must be the same on all ranks."""
    return ReduceScatterNorm(
        dtype=dtype, world_size=world_size, arch=arch, threads=shape.threads, vectors=shape.unroll, batch=shape.rows,
        aligned=aligned, reduce=reduce, gather=gather, residual=residual, replicate=replicate, bias=bias,
        quantize=quantize, multimem=multimem and aligned, pdl=pdl,
    )  # fmt: skip
