"""Imported once by the fork server, so that each rank of :func:`symmcomm.testing.spawn.run_ranks` starts warm.

What is not installed is skipped: a rank imports it itself, or does without.
"""

from __future__ import annotations

import contextlib
import importlib

for _name in ("numpy", "torch", "torch.distributed", "numba", "pytest", "symmcomm.communicator"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
