"""The ``symmcomm`` command."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from symmcomm import __version__
from symmcomm import doctor as doctors
from symmcomm.bench import tune as tuning
from symmcomm.bench.case import Case, Collective, cases
from symmcomm.bench.implementations import OWN
from symmcomm.bench.machine import find_gpus, usable_cores
from symmcomm.bench.method import Device, Machine, Method, choose, num_ranks
from symmcomm.bench.mpi_installations import MPIInstallation, find_mpis
from symmcomm.bench.plan_table import draw, ranking, ranking_json, scaled, scaling_table
from symmcomm.bench.plot import bytes_text, plot
from symmcomm.bench.rank import Ranks, end_now
from symmcomm.bench.report import Report, figure, refusals, table
from symmcomm.bench.run import joined, new_report, parse_peers, present, run, start_teams
from symmcomm.bench.team import Team
from symmcomm.bench.timing import Measurement, num_steps
from symmcomm.cli_options import (
    Begin,
    ColdL2,
    Dtype,
    End,
    Factor,
    JsonFile,
    Nproc,
    OnDevice,
    Peers,
    PlotFile,
    Reduction,
    Rounds,
    ShareGpu,
    Timed,
    VirtualRanks,
    checked,
    parse_output,
    parse_plot,
)
from symmcomm.env import Launch, Settings, parse_bytes
from symmcomm.errors import ArgumentError, SymmCommError
from symmcomm.schedule.cost import rank_plans
from symmcomm.schedule.dtypes import DType, Op, partial_dtype, supports
from symmcomm.schedule.machines import MACHINES
from symmcomm.schedule.topology import Topology, load_topology

_WIDTH = 140  # of a table that goes to a file

app = typer.Typer(
    help="Collectives over symmetric memory: benchmark, diagnosis, schedules.", no_args_is_help=True,
    pretty_exceptions_show_locals=False, add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"symmcomm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def bench(
    collective: Annotated[Collective, typer.Argument(help="What to measure.")] = Collective.all_reduce,
    nproc: Nproc = None,
    begin: Begin = 1 << 10,
    end: End = 64 << 20,
    factor: Factor = 4.0,
    dtype: Dtype = DType.float32,
    op: Reduction = Op.sum,
    peers: Peers = "none",
    rounds: Rounds = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    device: OnDevice = None,
    timing: Timed = None,
    cold_l2: ColdL2 = False,
    share_gpu: ShareGpu = False,
    virtual_ranks: VirtualRanks = 0,
) -> None:
    """Measures a collective and its peers in one run, as nccl-tests does; every result is checked first.

    Starts its ranks itself (by default one a GPU; without GPUs one a core, 2 to 8), or joins those of torchrun or
    mpirun. Exit code 1 if a rank failed or a result was wrong.
    """
    launch, machine = Launch.from_env(), find_gpus()
    try:
        method = choose(machine, device, timing, cold_l2, share_gpu, virtual_ranks)
        world_size = _world_size(method, machine, nproc, launch)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="options") from None
    mpis = find_mpis() if method.device is Device.cpu else {}
    try:
        chosen = parse_peers(peers, mpis, method.device)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--peers") from None
    if collective.reduces and not supports(dtype, op):
        raise typer.BadParameter(f"{op.name!r} has no meaning for {dtype.name}", param_hint="--op")
    if collective is Collective.send_recv and world_size < 2:
        raise typer.BadParameter(f"send_recv needs 2 ranks, not {world_size}", param_hint="--nproc")
    try:
        work = cases(collective, begin, end, factor, dtype, op, world_size)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="-b, -e, -f") from None
    report = new_report(world_size, rounds or method.rounds, mpis, method)
    finished = _measure_joined(work, chosen, report, launch) if joined(launch) else (
        _measure_spawned(work, chosen, report, mpis)
    )
    if finished:
        if "mpi" in peers.split(",") and not mpis:
            report.notes.append("mpi: n/a, no MPI and mpi4py are installed here")
        _write(report, work[0], json_file, plot_file)
        raise typer.Exit(0 if report.right else 1)


def _world_size(method: Method, machine: Machine, nproc: int | None, launch: Launch) -> int:
    ranks = joined(launch)
    if ranks is not None and nproc is not None and nproc != ranks:
        raise ArgumentError(f"--nproc {nproc} ranks, but the launcher started {ranks}; leave it out")
    if method.device is Device.cpu:
        return ranks or nproc or min(max(usable_cores(), 2), 8)
    return num_ranks(method, machine, nproc, ranks)


def _measure_spawned(work: list[Case], peers: list[str], report: Report, mpis: dict[str, MPIInstallation]) -> bool:
    """Starts the ranks. An error prints what was measured up to then."""
    try:
        _run(start_teams(peers, work[0].world_size, mpis, report.method), work, report)
    except SymmCommError as error:
        _print_table(report)
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    return True


def _measure_joined(work: list[Case], peers: list[str], report: Report, launch: Launch) -> bool:
    """On ranks that a launcher started; True on rank 0, which has the report. An error ends the process, the launcher
    the rest."""
    peers, notes = present(peers, launch, report.method.device)
    report.notes += notes
    try:
        ranks = Ranks([*OWN, *peers], report.method)
        if ranks.rank != 0:
            ranks.follow()
            return False
        _run([ranks], work, report)
    except BaseException:  # whatever it is, nobody is left waiting
        _print_table(report)
        traceback.print_exc()
        end_now()
    return True


def _run(teams: Sequence[Team], work: list[Case], report: Report) -> None:
    steps = len(work) * num_steps(sum(len(team.implementations) for team in teams), report.rounds)
    with _progress() as progress:
        task = progress.add_task("starting ranks", total=steps)
        run(
            teams, work, report,
            progress=lambda _: progress.update(task, advance=1),
            measured=lambda row: progress.update(task, description=_last(row)),
        )


def _progress() -> Progress:
    """On a terminal only, and gone when done."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False,
    )


def _last(row: list[Measurement]) -> str:
    """The case that was measured last, in a few words."""
    times = ", ".join(f"{m.implementation} {figure(m.time_us)}" for m in row if m.time_us)
    return f"{bytes_text(row[0].case.size_bytes)}: {times} us"


def _print_table(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(width=_WIDTH, highlight=False, soft_wrap=True)
    if report.measurements:
        console.print(table(report.measurements, report.floor))
    floor = [str(report.floor)] if report.floor else []
    for note in [*floor, *report.notes, *refusals(report.measurements)]:
        console.print(f"# {note}", markup=False)


def _write(report: Report, first: Case, json_file: Path | None, plot_file: Path | None) -> None:
    print(f"# {first.collective.value}, {report.place}, median of {report.rounds} rounds")
    _print_table(report)
    with _writing():
        if json_file is not None:
            json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
        if plot_file is not None:
            title = f"{first.collective.value}, {first.dtype.name}, {report.place}"
            plot(report.measurements, title, plot_file, report.floor)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Ends the command with one line if a file cannot be written after all, as on a full disk."""
    try:
        yield
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def doctor(
    nproc: Nproc = None,
    device: OnDevice = None,
    share_gpu: ShareGpu = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Says what was found, which paths are possible, and why the others are not.

    With --nproc, also starts ranks and lets them reduce; exit code 1 if they do not agree.
    """
    machine = find_gpus()
    try:
        method = choose(machine, device, None, False, share_gpu, 0)
        if nproc and method.device is Device.cuda:
            num_ranks(method, machine, nproc, None)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="options") from None
    diagnosis = doctors.examine(nproc, method)
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=1))
    else:
        console = Console()
        for part in doctors.tables(diagnosis):
            console.print(part)
    raise typer.Exit(0 if diagnosis.healthy else 1)


@app.command()
def tune(
    nproc: Nproc = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", parser=checked(parse_output), help="Default: SYMMCOMM_TUNING."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed rounds; the median counts.")] = tuning.ROUNDS,
) -> None:
    """Measures the sizes at which one GPU kernel becomes faster than another, and writes the table that later runs read
    (SYMMCOMM_TUNING).

    Starts one rank per GPU by torchrun, or joins the ranks of a launcher.
    """
    launch = Launch.from_env()
    if joined(launch) is None:
        if launch.world_size == 1:
            raise typer.BadParameter("one rank has nothing to tune: two at least", param_hint="--nproc")
        if not (machine := find_gpus()).num_gpus:
            raise typer.BadParameter(f"only kernels of GPUs are tuned: {machine.obstacle}", param_hint="options")
        script = ["-m", "symmcomm", "tune", "--rounds", str(rounds), *(["--output", str(output)] if output else [])]
        ranks = ["--standalone", "--nproc-per-node", str(nproc) if nproc else "gpu"]
        raise typer.Exit(subprocess.run([sys.executable, "-m", "torch.distributed.run", *ranks, *script]).returncode)
    settings = Settings.from_env()
    path = output or Path(settings.tuning).expanduser()
    comm = tuning.join(launch, settings)
    thresholds = tuning.tune(comm, rounds, print if comm.rank == 0 else lambda _: None)
    tuning.write(comm, thresholds, path)
    if comm.rank == 0:
        print(f"{comm.gpu_side.tuned_for}\n{thresholds}\nwritten to {path}")
    comm.close()


def _parse_topology(text: str) -> Topology:
    return MACHINES[text] if text in MACHINES else load_topology(text)


@app.command()
def plan(
    topology: Annotated[
        Topology,
        typer.Option(
            "--topology", metavar="FILE", parser=checked(_parse_topology),
            help=f"TOML or JSON, see symmcomm.schedule.topology; or one of: {', '.join(MACHINES)}.",
        ),
    ],
    num_bytes: Annotated[
        int,
        typer.Option("--bytes", metavar="SIZE", parser=checked(parse_bytes), show_default="64M", help="Per rank."),
    ] = 64 << 20,
    dtype: Dtype = DType.float32,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", parser=checked(parse_plot), help="Draws the best plan.")
    ] = None,
    json_file: JsonFile = None,
    scale: Annotated[bool, typer.Option("--scale", help="Also: 8 to 4096 ranks on a modelled cluster.")] = False,
) -> None:
    """Ranks the reduce-scatter schedules of a topology by a model of its links, and draws the best."""
    ranked = rank_plans(topology, num_bytes, partial_factor=partial_dtype(dtype, Op.sum).itemsize / dtype.itemsize)
    console = Console(highlight=False, soft_wrap=True)
    print(f"# reduce-scatter of {bytes_text(num_bytes)} of {dtype.name}, {topology.world_size} ranks, by the model")
    console.print(ranking(ranked))
    rows = scaled(num_bytes) if scale else []
    if scale:
        print(f"\n# {bytes_text(num_bytes)} on nodes of 8 GPUs: rings of rings, one flat ring, the least possible")
        console.print(scaling_table(rows))
    with _writing():
        if json_file is not None:
            worlds = [{"ranks": size, "extents": extents, "seconds": times._asdict()} for size, extents, times in rows]
            json_file.write_text(json.dumps({"ranking": ranking_json(ranked), "scaling": worlds}, indent=1) + "\n")
        if plot_file is not None:
            best = ranked[0].plan
            draw(best, topology, f"{best.name}, {topology.world_size} ranks: segment → receiver", plot_file)


def main() -> None:
    """Entry point of the ``symmcomm`` command."""
    try:
        app(prog_name="symmcomm")
    except SymmCommError as error:  # such as a SYMMCOMM_* variable that does not parse
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
