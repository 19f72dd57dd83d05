"""Collectives over symmetric memory: every rank maps every peer's memory at a fixed distance.

    comm = symmcomm.init()                    # under torchrun, mpirun, or alone
    x = comm.empty(1 << 20)                   # symmetric: collectives on it copy nothing
    comm.all_reduce(x.fill_(comm.rank))

    torch.distributed.init_process_group("symm")    # or as the backend of an existing script

Importing the package starts nothing: no process, no thread, no device. Names are imported when they are first used, as
torch imports the package itself where it is installed (entry points).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from symmcomm.distributed.registration import register

if TYPE_CHECKING:
    from symmcomm.communicator import Communicator as Communicator
    from symmcomm.communicator import init as init
    from symmcomm.env import Settings as Settings
    from symmcomm.errors import ArgumentError as ArgumentError
    from symmcomm.errors import BootstrapError as BootstrapError
    from symmcomm.errors import ClosedError as ClosedError
    from symmcomm.errors import ConcurrentCallError as ConcurrentCallError
    from symmcomm.errors import CudaError as CudaError
    from symmcomm.errors import DeviceError as DeviceError
    from symmcomm.errors import DTypeError as DTypeError
    from symmcomm.errors import ExchangeError as ExchangeError
    from symmcomm.errors import HostMismatchError as HostMismatchError
    from symmcomm.errors import MismatchError as MismatchError
    from symmcomm.errors import OutOfSymmetricMemoryError as OutOfSymmetricMemoryError
    from symmcomm.errors import PeerAbortedError as PeerAbortedError
    from symmcomm.errors import PeerDiedError as PeerDiedError
    from symmcomm.errors import PeerError as PeerError
    from symmcomm.errors import PeerTimeoutError as PeerTimeoutError
    from symmcomm.errors import SymmCommError as SymmCommError
    from symmcomm.errors import WaitTimeoutError as WaitTimeoutError
    from symmcomm.memory.handle import SymmetricHandle as SymmetricHandle

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "ClosedError",
    "Communicator",
    "ConcurrentCallError",
    "CudaError",
    "DTypeError",
    "DeviceError",
    "ExchangeError",
    "HostMismatchError",
    "MismatchError",
    "OutOfSymmetricMemoryError",
    "PeerAbortedError",
    "PeerDiedError",
    "PeerError",
    "PeerTimeoutError",
    "Settings",
    "SymmCommError",
    "SymmetricHandle",
    "WaitTimeoutError",
    "init",
]

_HOMES = {"Communicator": "communicator", "init": "communicator", "Settings": "env", "SymmetricHandle": "memory.handle"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'symmcomm' has no attribute {name!r}")
    value = getattr(import_module(f"symmcomm.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


register()
