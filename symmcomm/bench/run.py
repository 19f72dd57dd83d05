"""One run of the benchmark: which teams, which cases, in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from symmcomm.bench.case import Case
from symmcomm.bench.floor import Floor
from symmcomm.bench.implementations import OWN, RING
from symmcomm.bench.machine import hardware
from symmcomm.bench.method import ON_CPUS, Device, Method
from symmcomm.bench.mpi_installations import MPIInstallation
from symmcomm.bench.report import Report, versions
from symmcomm.bench.team import SpawnedTeam, Team
from symmcomm.bench.timing import Measurement, Progress, measure
from symmcomm.env import Launch, Settings
from symmcomm.errors import ArgumentError

PEERS = {
    Device.cpu: (RING, "gloo", "openmpi", "mpich"),
    Device.cuda: (RING, "nccl", "nccl_symm", "torch_one_shot", "torch_two_shot", "nvshmem"),
}
"""By device."""
_SETS = {Device.cpu: "mpi", Device.cuda: "torch_symm_mem"}  # names that stand for several
_MPI_NAMES = {"Open MPI": "openmpi", "MPICH": "mpich"}


def joined(launch: Launch) -> int | None:
    """The number of ranks that torchrun or mpirun started with this one; ``None`` if there are no others."""
    world_size = launch.world_size if launch.world_size is not None else launch.mpi_world_size
    return world_size if world_size is not None and world_size > 1 else None


def parse_peers(text: str, installed: Iterable[str], device: Device = Device.cpu) -> list[str]:
    """``"gloo,mpi"`` -> names out of PEERS, each once; ``mpi`` is every MPI installed, ``torch_symm_mem`` both of
    torch's forms, ``none`` nobody.

    Raises ArgumentError for an unknown name, and for an MPI that is named but not installed. What cannot run on a GPU
    says so in its place of the table.
    """
    known = PEERS[device]
    available = list(known) if device is Device.cuda else [RING, "gloo", *installed]
    several = {
        "mpi": [peer for peer in available if peer not in (RING, "gloo")],
        "torch_symm_mem": [peer for peer in known if peer.startswith("torch_")],
    }
    names: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == _SETS[device]:
            names += several[name]
        elif name in known:
            if name not in available:
                raise ArgumentError(f"{name!r} is not installed (found: {', '.join(available)}); see symmcomm doctor")
            names.append(name)
        elif name != "none":
            expected = f"expected some of {', '.join(known)}, or {_SETS[device]}, or none"
            raise ArgumentError(f"{name!r} is not a peer on {device.value}: {expected}")
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class TeamPlan:
    """Who runs in one set of processes, and whose launcher starts them."""

    name: str
    implementations: list[str]
    launcher: str | None


def plan_teams(peers: Sequence[str], device: Device = Device.cpu) -> list[TeamPlan]:
    """Everybody together, as far as possible: two MPIs cannot live in one process."""
    if device is Device.cuda:
        return [TeamPlan("own", [*OWN, *peers], None)]
    launcher = "openmpi" if "openmpi" in peers else None
    own = TeamPlan("own", [*OWN, *(peer for peer in (RING, "gloo", "openmpi") if peer in peers)], launcher)
    return [own, TeamPlan("mpich", ["mpich"], "mpich")] if "mpich" in peers else [own]


def present(peers: Sequence[str], launch: Launch, device: Device = Device.cpu) -> tuple[list[str], list[str]]:
    """Of the peers, those that ranks started by torchrun or mpirun can run, and notes about the others."""
    mpi = None if launch.rank is not None else _MPI_NAMES.get(launch.mpi or "")
    possible = [peer for peer in peers if device is Device.cuda or peer in (RING, "gloo", mpi)]
    starter = launch.mpi if mpi else "torchrun"
    absent = [f"{peer}: n/a, the ranks were started by {starter}" for peer in peers if peer not in possible]
    return possible, absent


def start_teams(
    peers: Sequence[str], world_size: int, mpis: Mapping[str, MPIInstallation], method: Method = ON_CPUS
) -> list[SpawnedTeam]:
    """Starts all teams at the same time; they find each other while the first command waits."""
    timeout_s = Settings.from_env().timeout_s
    processes = 1 if method.virtual_ranks else world_size
    teams: list[SpawnedTeam] = []
    try:
        for plan in plan_teams(peers, method.device):
            mpi = mpis[plan.launcher] if plan.launcher else None
            teams.append(SpawnedTeam(plan.name, plan.implementations, processes, mpi, timeout_s, method))
    except BaseException:
        for team in teams:
            team.kill()
        raise
    return teams


def run(
    teams: Sequence[Team],
    cases: Sequence[Case],
    report: Report,
    progress: Progress,
    measured: Callable[[list[Measurement]], None],
) -> None:
    """Measures all cases into ``report``, telling ``measured`` after each; ends the teams in any case.

    Raises TeamError if a rank fails or is late.
    """
    try:
        for team in teams:
            report.learn(team.ask({"do": "describe"}))
        report.floor = Floor.of_ranks(teams[0].ask({"do": "limits"}))
        for case in cases:
            report.measurements.append(measure(teams, case, report.rounds, progress, report.method))
            measured(report.measurements[-1])
        for team in teams:
            team.close()
    except BaseException:
        for team in teams:
            team.kill()
        raise


def new_report(
    world_size: int, rounds: int, mpis: Mapping[str, MPIInstallation], method: Method = ON_CPUS
) -> Report:
    """A report that holds no measurement yet."""
    found = versions() | {"python": sys.version.split()[0]} | {name: mpi.version for name, mpi in mpis.items()}
    machine = hardware() | {"ranks": world_size}
    return Report(command=["symmcomm", *sys.argv[1:]], machine=machine, versions=found, rounds=rounds, method=method)
