"""Ranks started by mpirun, through mpi4py, which is imported here only.

Everything is point to point and polled: a collective of MPI could neither keep a deadline nor name who is missing.
"""

from __future__ import annotations

import itertools
import sys
import time

from symmcomm.env import Launch
from symmcomm.errors import BootstrapError, PeerTimeoutError

try:
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        # MPICH ends a process that Open MPI's mpirun started, so look at the library before MPI is initialised.
        mpi4py.rc(initialize=False, finalize=True)
    from mpi4py import MPI
except ImportError as error:
    raise BootstrapError(f"mpirun started this process, but mpi4py is missing (extra: mpi): {error}") from error
except RuntimeError as error:
    raise BootstrapError(f"mpirun started this process, but mpi4py finds no MPI library: {error}") from error

_POLL_S = (0.00005, 0.005)  # first and longest pause between two looks
_numbers = itertools.count(1)
_worlds: list[MPI.Intracomm] = []  # our duplicate of COMM_WORLD, once there is one
_unsent: list[tuple[MPI.Request, bytes]] = []  # what a time-out left behind: MPI may still read the payloads


class MPIBootstrap:
    """Gathers over a duplicate of COMM_WORLD; each bootstrap of a process has its own tag there."""

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        self.name = _library()
        self.rank, self.world_size = comm.rank, comm.size
        self._comm, self._tag = comm, tag

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """See :class:`symmcomm.bootstrap.Bootstrap`."""
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        sends = [(self._comm.Isend([payload, MPI.BYTE], peer, self._tag), payload) for peer in peers]
        received: dict[int, bytes | bytearray] = {self.rank: bytes(payload)}
        receives: dict[int, tuple[MPI.Request, bytearray]] = {}
        deadline, pause_s = time.monotonic() + timeout_s, _POLL_S[0]
        while True:
            for peer in peers:
                if peer not in receives and peer not in received:
                    self._start(peer, receives)
            for peer in [peer for peer, (request, _) in receives.items() if request.Test()]:
                received[peer] = receives.pop(peer)[1]
            sends = [send for send in sends if not send[0].Test()]
            if len(received) == self.world_size and not sends:
                return [bytes(received[rank]) for rank in range(self.world_size)]
            if time.monotonic() > deadline:
                _unsent.extend(sends)
                raise self._timed_out(received, timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])

    def close(self) -> None:
        """Does nothing: the duplicate of COMM_WORLD lives until MPI is finalised."""

    def _start(self, peer: int, receives: dict[int, tuple[MPI.Request, bytearray]]) -> None:
        """Starts to receive the peer's payload, if it is on its way."""
        status = MPI.Status()
        message = self._comm.Improbe(peer, self._tag, status)
        if message is not None:
            payload = bytearray(status.Get_count(MPI.BYTE))
            receives[peer] = message.Irecv([payload, MPI.BYTE]), payload

    def _timed_out(self, received: dict[int, bytes | bytearray], timeout_s: float) -> PeerTimeoutError:
        missing = next((rank for rank in range(self.world_size) if rank not in received), None)
        if missing is None:
            missing, deed = (self.rank + 1) % self.world_size, "take its payload"
        else:
            deed = "send its payload"
        return PeerTimeoutError(
            f"rank {self.rank} waited {timeout_s:g} s for rank {missing} of {self.world_size} to {deed} ({self.name})",
            missing,
        )


def connect_mpi(launch: Launch, timeout_s: float) -> MPIBootstrap:
    """Through mpi4py. Initialises MPI only if nobody has.

    Raises BootstrapError if MPI is finalised, or if mpi4py was loaded with another MPI library than mpirun's.
    """
    if MPI.Is_finalized():
        raise BootstrapError("MPI is finalised already; symmcomm.init() comes before MPI.Finalize()")
    if not MPI.Is_initialized():
        if launch.mpi == "Open MPI" and MPI.get_vendor()[0] == "MPICH":
            raise _other_library(launch)
        MPI.Init_thread()
    if launch.mpi_world_size != MPI.COMM_WORLD.size:
        raise _other_library(launch)
    return MPIBootstrap(_duplicate_world(timeout_s), next(_numbers) % _largest_tag())


def _other_library(launch: Launch) -> BootstrapError:
    return BootstrapError(
        f"mpirun of {launch.mpi} started {launch.mpi_world_size} ranks, which mpi4py cannot see: it was loaded with "
        f"{_library()}. Use the mpirun of that library, or set MPI4PY_LIBMPI to {launch.mpi}'s libmpi.so"
    )


def _duplicate_world(timeout_s: float) -> MPI.Intracomm:
    """A communicator of our own, once a process. Duplicating is collective, so first see that all ranks come."""
    if not _worlds:
        MPIBootstrap(MPI.COMM_WORLD, _largest_tag()).all_gather(b"", timeout_s)
        _worlds.append(MPI.COMM_WORLD.Dup())
    return _worlds[0]


def _largest_tag() -> int:
    return MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767  # the least that MPI promises


def _library() -> str:
    """``"Open MPI v5.0.11"``."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} v{'.'.join(map(str, version))}"
