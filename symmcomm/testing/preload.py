"""Imported once by the fork server, so that each rank of :func:`symmcomm.testing.spawn.run_ranks` starts warm.

``SYMMCOMM_PRELOAD=gpu``, for ranks that compute on GPUs, loads the compiler of their kernels; otherwise all reductions
of the CPU are loaded, which takes half a minute. What cannot be imported is skipped: a rank that needs it shows the
error, a traceback included.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from symmcomm.env import ranks_of_tests_are_for_gpus

_FOR_GPUS = ranks_of_tests_are_for_gpus()
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""The compiler's import asks torch whether there are GPUs; by NVML that does not start CUDA, which outlives no fork."""

_modules = ["numpy", "torch", "torch.distributed", "numba", "pytest", "symmcomm.communicator"]
if _FOR_GPUS:
    _modules += ["symmcomm.collectives.gpu", "symmcomm.kernels.gpu.instances", "symmcomm.kernels.gpu.norm_instances"]
_before = os.environ.get(_ASK_NVML)
os.environ[_ASK_NVML] = "1"
for _name in _modules:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
del os.environ[_ASK_NVML]
if _before is not None:
    os.environ[_ASK_NVML] = _before


def _load_kernels() -> None:
    """Compiled code is inherited by the ranks as well."""
    from symmcomm.kernels import cpu
    from symmcomm.kernels.compile import compile_once
    from symmcomm.kernels.cpu.reduce import reduction
    from symmcomm.kernels.cpu.ring import addition
    from symmcomm.schedule.dtypes import DType, Op, partial_dtype, supports

    compile_once(cpu.load)
    for dtype in DType if not _FOR_GPUS else ():
        for op in Op:
            if supports(dtype, op):
                reduction(dtype, op)
                addition(dtype, partial_dtype(dtype, op), op, False)
                addition(dtype, partial_dtype(dtype, op), op, True)


with contextlib.suppress(Exception):
    _load_kernels()
