"""The kernel of a shape: what ``schedule.select_gpu`` chose, with what is compiled into it.

``early``: whether the ranks have a GPU each that knows programmatic dependent launch (from sm_90 on). Small kernels
then start early, see ``context.after_previous_kernel``. ``granule``: as of ``lamport_parts.PartsInTurns``, which
only Lamport kernels are compiled for; the others find out.
"""

from __future__ import annotations

from typing import Any

from symmcomm.kernels.gpu.all_gather import AllGatherLL, AllGatherPull, AllGatherPush
from symmcomm.kernels.gpu.all_gather_lamport import AllGatherLamport
from symmcomm.kernels.gpu.all_reduce import AllReduceStaged, AllReduceTwoShot
from symmcomm.kernels.gpu.all_reduce_ll import AllReduceLLTwoShot
from symmcomm.kernels.gpu.all_to_all import AllToAllStaged, AllToAllUneven
from symmcomm.kernels.gpu.compile import Kernel
from symmcomm.kernels.gpu.reduce_scatter import ReduceScatterLL, ReduceScatterPull, ReduceScatterStaged
from symmcomm.kernels.gpu.reduce_scatter_lamport import ReduceScatterLamport
from symmcomm.schedule.dtypes import DType, Op
from symmcomm.schedule.select_gpu import Algorithm, Launch, may_start_early


def all_reduce(
    shape: Launch, dtype: DType, op: Op, world_size: int, arch: int, early: bool = False, granule: int = 1
) -> Kernel:
    """See ``select_gpu.choose``; ``arch`` as in ``sm_<arch>``."""
    reduction: dict[str, Any] = {"dtype": dtype, "op": op, "world_size": world_size, "arch": arch}
    match shape.algorithm:
        case Algorithm.ll:
            return ReduceScatterLL(**reduction, **_cells(shape, world_size, early), same=True)
        case Algorithm.lamport:
            return ReduceScatterLamport(**reduction, **_lamport(shape, world_size, early, granule), same=True)
        case Algorithm.ll_two_shot:
            return AllReduceLLTwoShot(**reduction, **_cells(shape, world_size, early))
        case Algorithm.two_shot:
            return AllReduceTwoShot(**reduction, **_direct(shape))
        case Algorithm.pull:
            return ReduceScatterPull(**reduction, **_direct(shape), same=True)
    if shape.algorithm is Algorithm.one_shot:
        return ReduceScatterStaged(**reduction, **_chunks(shape), same=True)
    return AllReduceStaged(**reduction, **_chunks(shape), symmetric=shape.algorithm is Algorithm.push)


def reduce_scatter(
    shape: Launch, dtype: DType, op: Op, world_size: int, arch: int, early: bool = False, granule: int = 1
) -> Kernel:
    """See ``select_gpu.choose_reduce_scatter``; ``arch`` as in ``sm_<arch>``."""
    reduction: dict[str, Any] = {"dtype": dtype, "op": op, "world_size": world_size, "arch": arch}
    match shape.algorithm:
        case Algorithm.ll:
            return ReduceScatterLL(**reduction, **_cells(shape, world_size, early))
        case Algorithm.lamport:
            return ReduceScatterLamport(**reduction, **_lamport(shape, world_size, early, granule))
        case Algorithm.pull:
            return ReduceScatterPull(**reduction, **_direct(shape))
    return ReduceScatterStaged(**reduction, **_chunks(shape))


def all_gather(shape: Launch, world_size: int, same: bool, early: bool = False, granule: int = 1) -> Kernel:
    """See ``select_gpu.choose_all_gather``; ``same``: all takers get the same."""
    match shape.algorithm:
        case Algorithm.ll:
            return AllGatherLL(world_size=world_size, same=same, **_cells(shape, world_size, early))
        case Algorithm.lamport:
            return AllGatherLamport(world_size=world_size, same=same, **_lamport(shape, world_size, early, granule))
        case Algorithm.push:
            return AllGatherPush(world_size=world_size, **_direct(shape))
        case Algorithm.pull:
            return AllGatherPull(world_size=world_size, threads=shape.threads, vectors=shape.unroll)
    return AllToAllStaged(world_size=world_size, **_chunks(shape))


def all_to_all_uneven(shape: Launch, world_size: int) -> Kernel:
    """See ``select_gpu.uneven_shape``."""
    return AllToAllUneven(
        world_size=world_size, threads=shape.threads, vectors=shape.unroll, chunk_bytes=shape.chunk_bytes
    )


def _cells(shape: Launch, world_size: int, early: bool) -> dict[str, Any]:
    early = early and may_start_early(shape, world_size)
    return {"threads": shape.threads, "cells": shape.unroll, "early": early}


def _lamport(shape: Launch, world_size: int, early: bool, granule: int) -> dict[str, Any]:
    early = early and may_start_early(shape, world_size, granule)
    return {
        "threads": shape.threads, "vectors": shape.unroll, "slots": shape.slots, "early": early, "granule": granule,
    }  # fmt: skip


def _direct(shape: Launch) -> dict[str, Any]:
    return {"threads": shape.threads, "vectors": shape.unroll, "multimem": shape.multimem}


def _chunks(shape: Launch) -> dict[str, Any]:
    return {"threads": shape.threads, "vectors": shape.unroll, "chunk_bytes": shape.chunk_bytes}
