"""Collectives over symmetric memory: every rank maps every peer's memory at a fixed distance.

    comm = symmcomm.init()                    # under torchrun, mpirun, or alone
    x = comm.empty(1 << 20)                   # symmetric: collectives on it copy nothing
    comm.all_reduce(x.fill_(comm.rank))

Importing the package starts nothing: no process, no thread, no device.
"""

from symmcomm.communicator import Communicator, init
from symmcomm.env import Settings
from symmcomm.errors import (
    ArgumentError,
    BootstrapError,
    ClosedError,
    ConcurrentCallError,
    DTypeError,
    ExchangeError,
    HostMismatchError,
    MismatchError,
    OutOfSymmetricMemoryError,
    PeerAbortedError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    SymmCommError,
)
from symmcomm.memory.handle import SymmetricHandle

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "ClosedError",
    "Communicator",
    "ConcurrentCallError",
    "DTypeError",
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
    "init",
]
