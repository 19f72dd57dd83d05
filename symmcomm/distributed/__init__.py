"""How users of torch meet symmcomm: the backend ``symm``, ``torch.ops.symmcomm``, symmetric memory.

Nothing is imported here: ``import symmcomm`` only registers the backend's name (``registration``).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from symmcomm.distributed.norm_pass import fuse_norm as fuse_norm


def __getattr__(name: str) -> object:
    if name != "fuse_norm":
        raise AttributeError(f"module 'symmcomm.distributed' has no attribute {name!r}")
    from symmcomm.distributed.norm_pass import fuse_norm

    return fuse_norm
