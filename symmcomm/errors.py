"""One exception tree: everything the library raises on purpose derives from :class:`SymmCommError`.

Errors about an argument also derive from the built-in a Python user expects (``ValueError``, ``TypeError``, …), so
``except ValueError`` keeps working. Each message names the argument and both values.
"""

from __future__ import annotations

import copy


class SymmCommError(Exception):
    """Base of all errors of symmcomm."""


class ArgumentError(SymmCommError, ValueError):
    """An argument of this call is wrong on the calling rank; nothing was communicated."""


class DTypeError(SymmCommError, TypeError):
    """The dtype is not supported, or lacks the requested reduction."""


class ClosedError(SymmCommError, RuntimeError):
    """The communicator was closed, or is used in a process forked after ``init``."""


class ConcurrentCallError(SymmCommError, RuntimeError):
    """Two threads are inside collectives of one communicator; ``split()`` gives each its own."""


class MismatchError(SymmCommError, RuntimeError):
    """Ranks disagree about one collective call. Raised on every rank; the communicator stays usable."""


class TopologyError(ArgumentError):
    """A topology does not parse (the line is named), is not connected, or does not fit the ranks or the schedule."""


class PlanError(SymmCommError, ValueError):
    """A schedule is wrong; the message names the step and the rule that it breaks (``schedule.simulate.simulate``)."""


class OutOfSymmetricMemoryError(SymmCommError, MemoryError):
    """The symmetric heap cannot hold the request; names its size, what is used and the variable to change."""


class BootstrapError(SymmCommError, RuntimeError):
    """The ranks could not find each other."""


class HostMismatchError(BootstrapError):
    """Ranks run on different hosts (or network namespaces) where shared memory cannot reach."""


class ExchangeError(SymmCommError, RuntimeError):
    """A memory descriptor could not be passed between two ranks."""


class DeviceError(SymmCommError, RuntimeError):
    """The kernels do not run on a rank's device, or the ranks' devices cannot share memory. On every rank."""


class CudaError(SymmCommError, RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        code: the driver's name for it, as ``CUDA_ERROR_NOT_SUPPORTED``.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[CudaError], tuple[object, ...]]:
        return type(self), (self.args[0], self.code)


class PeerError(SymmCommError, RuntimeError):
    """A peer did not do its part. The communicator is no longer usable; ``rank`` names the peer.

    Attributes:
        rank: the peer's rank in the communicator.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerError], tuple[object, ...]]:
        return type(self), (self.args[0], self.rank)


class PeerTimeoutError(PeerError, TimeoutError):
    """A peer did not arrive before the deadline (``SYMMCOMM_TIMEOUT_S``)."""


class WaitTimeoutError(SymmCommError, RuntimeError, TimeoutError):
    """A wait for an asynchronous call ended before the call did; the call goes on."""


class PeerAbortedError(PeerError):
    """A peer raised an error inside a collective and told the others."""


class PeerDiedError(PeerError, ConnectionError):
    """A peer's process is gone.

    Attributes:
        pid: the peer's process id.
    """

    def __init__(self, message: str, rank: int, pid: int) -> None:
        super().__init__(message, rank)
        self.pid = pid

    def __reduce__(self) -> tuple[type[PeerDiedError], tuple[object, ...]]:
        return type(self), (self.args[0], self.rank, self.pid)


def retold(error: BaseException) -> SymmCommError:
    """What calls raise after the one that ended with ``error``, and the communicator with it: a copy, which holds no
    frames of callers and gathers none; and the name only of what is not an error of symmcomm, as KeyboardInterrupt."""
    if isinstance(error, SymmCommError):
        return copy.copy(error)
    return ClosedError(f"the communicator is finished: a call was ended by {in_words(error)}")


def in_words(error: BaseException) -> str:
    """The error's type and, if it has one, its text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
