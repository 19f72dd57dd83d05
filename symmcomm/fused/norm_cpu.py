"""Runs a norm on the CPU: fills the job that the kernels read (``kernels.cpu.norm``) and calls them."""

from __future__ import annotations

import struct
import threading
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from symmcomm.collectives.call import parse_dtype
from symmcomm.fused.call import Task
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.select_norm import MAX_HIDDEN

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator
    from symmcomm.kernels.cpu import Entry

_JOB = struct.Struct("20q2d4q")
_JOB_WORDS = 32


class _Scratch(threading.local):
    """A thread's job and the row of float32 in which kernels sum; a call uses them while it runs."""

    def __init__(self) -> None:
        memory = np.empty(_JOB_WORDS + MAX_HIDDEN // 2, dtype=np.int64)
        self.memory, self.job = memory.data, int(memory.ctypes.data)  # the view keeps the array


_scratch = _Scratch()


@cache
def entries(dtype: torch.dtype, has_residual: bool, keeps: bool, scaled: bool, has_bias: bool) -> tuple[int, int]:
    """Addresses of ``add`` and ``normalise``, compiled on first use (a second each)."""
    from symmcomm.kernels.cpu import norm

    own = parse_dtype(dtype)
    parts = norm.WITH_RESIDUAL * has_residual | norm.KEEPS * keeps
    out_dtype = DType.float8_e4m3fn if scaled else own
    return norm.add_entry(own, parts), norm.normalise_entry(own, out_dtype, has_bias, norm.keeps_exactly(own, parts))


@cache
def _kernel(name: str, num_args: int) -> Entry:
    from symmcomm.kernels.compile import compile_once
    from symmcomm.kernels.cpu import _entry, fused_norm, norm

    kernel = getattr(norm if name == "norm_rows" else fused_norm, name)
    return compile_once(lambda: _entry(kernel, num_args))


def _job(task: Task, call: int, form: int, groups: tuple[int, int, int]) -> int:
    """Address of the filled job; its fields are those of ``kernels.cpu.norm``, in their order. SOURCES is one word
    behind it; the collectives put their own there."""
    scratch, itemsize, first, sharded = _scratch, task.dtype.itemsize, task.first, task.sharded
    add, normalise = entries(task.dtype, task.residual != 0, task.new_residual != 0, task.scaled, task.bias != 0)
    tile = scratch.job + 8 * _JOB_WORDS
    source, residual, kept, out, scales = task.input, task.residual, task.new_residual, task.out, task.scales
    if "input" in sharded:
        source -= first * task.input_pitch
    if "residual" in sharded:
        residual -= first * task.residual_pitch
        kept -= first * task.new_residual_pitch
    if "out" in sharded:
        out -= first * task.out_pitch
        scales -= 4 * first if scales else 0
    _JOB.pack_into(
        scratch.memory, 0,
        call, add, normalise, itemsize, task.rows, task.hidden, source, task.input_pitch,
        residual, task.residual_pitch, kept, task.new_residual_pitch, out, task.out_pitch,
        1 if task.scaled else itemsize, scales, task.weight, task.bias, tile - 8, tile,
        task.eps, task.weight_bias, *groups, form,
    )  # fmt: skip
    return scratch.job


def run_packed(comm: Communicator, fields: tuple[int, ...], eps: float, weight_bias: float) -> None:
    """An all-reduce and norm whose job is given up to SOURCES."""
    scratch = _scratch
    tile = scratch.job + 8 * _JOB_WORDS
    _JOB.pack_into(scratch.memory, 0, *fields, tile - 8, tile, eps, weight_bias, 1, 0, 0, 0)
    status = _kernel("fused_norm", 2)(comm.ctx, scratch.job)
    if status:
        comm.fail(status)


def norm_rows(task: Task, num_groups: int = 1, input_step: int = 0, out_step: int = 0) -> None:
    """``num_groups`` times ``task.rows`` rows, without peers; steps are bytes from group to group."""
    _kernel("norm_rows", 1)(_job(task, 0, 0, (num_groups, input_step, out_step)))


def fused_norm(comm: Communicator, task: Task, call: int, form: int) -> None:
    """A collective; ``form`` is one of ``kernels.cpu.fused_norm``."""
    status = _kernel("fused_norm", 2)(comm.ctx, _job(task, call, form, (1, 0, 0)))
    if status:
        comm.fail(status)
