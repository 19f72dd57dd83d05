"""The ``symmcomm`` command."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from symmcomm import doctor as doctors
from symmcomm.bench import tune as tuning
from symmcomm.bench.case import Case, Collective, cases
from symmcomm.bench.implementations import OWN
from symmcomm.bench.machine import usable_cores
from symmcomm.bench.mpi_installations import MPIInstallation, find_mpis
from symmcomm.bench.plot import bytes_text, plot
from symmcomm.bench.rank import Ranks, end_now
from symmcomm.bench.report import Report, figure, refusals, table
from symmcomm.bench.run import PEERS, joined, new_report, parse_peers, present, run, start_teams
from symmcomm.bench.team import Team
from symmcomm.bench.timing import Measurement, num_steps
from symmcomm.env import Launch, Settings, parse_bytes
from symmcomm.errors import ArgumentError, SymmCommError
from symmcomm.schedule.dtypes import DType, Op, supports

MAX_RANKS = 64
_WIDTH = 140  # of a table that goes to a file
_IMAGE_SUFFIXES = (".png", ".svg", ".pdf")

app = typer.Typer(
    help="Collectives over symmetric memory: benchmark and diagnosis.", no_args_is_help=True,
    pretty_exceptions_show_locals=False, add_completion=False,
)


def _checked(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A parser whose ArgumentError becomes a usage error. Defaults pass as they are."""

    def parser(text: Any) -> Any:
        try:
            return parse(text) if isinstance(text, str) else text
        except ArgumentError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


def _parse_dtype(text: str) -> DType:
    if text not in DType.__members__:
        raise ArgumentError(f"{text!r} is no dtype: expected one of {', '.join(DType.__members__)}")
    return DType[text]


def _parse_op(text: str) -> Op:
    if text not in Op.__members__:
        raise ArgumentError(f"{text!r} is no reduction: expected one of {', '.join(Op.__members__)}")
    return Op[text]


def _parse_output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentError(f"{text!r} cannot be written: {'it' if path.is_dir() else 'its folder'} is no such thing")
    return path


def _parse_plot(text: str) -> Path:
    if Path(text).suffix not in _IMAGE_SUFFIXES:
        raise ArgumentError(f"{text!r} has no suffix out of {', '.join(_IMAGE_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("a plot needs matplotlib: install symmcomm with the extra 'plot'")
    return _parse_output(text)


def _check_ranks(nproc: int | None) -> int | None:
    if nproc is not None and not 1 <= nproc <= MAX_RANKS:
        raise typer.BadParameter(f"{nproc} is not in 1..{MAX_RANKS}")
    return nproc


def _check_rounds(rounds: int) -> int:
    if rounds < 1:
        raise typer.BadParameter(f"{rounds} is not positive")
    return rounds


Nproc = Annotated[
    int | None, typer.Option("--nproc", callback=_check_ranks, help=f"Ranks to start, up to {MAX_RANKS}.")
]
Begin = Annotated[
    int,
    typer.Option("--begin", "-b", metavar="SIZE", parser=_checked(parse_bytes), show_default="1K", help="First size."),
]
End = Annotated[
    int,
    typer.Option("--end", "-e", metavar="SIZE", parser=_checked(parse_bytes), show_default="64M", help="Last size."),
]
Factor = Annotated[float, typer.Option("--factor", "-f", help="From one size to the next.")]
Dtype = Annotated[
    DType,
    typer.Option(
        "--dtype", "-d", metavar="NAME", parser=_checked(_parse_dtype), show_default="float32",
        help=f"Out of {', '.join(DType.__members__)}.",
    ),
]
Reduction = Annotated[
    Op,
    typer.Option(
        "--op", metavar="NAME", parser=_checked(_parse_op), show_default="sum",
        help=f"Out of {', '.join(Op.__members__)}.",
    ),
]
Peers = Annotated[
    str, typer.Option("--peers", metavar="NAMES", help=f"Out of {', '.join(PEERS)}; mpi is every MPI installed.")
]
Rounds = Annotated[int, typer.Option("--rounds", callback=_check_rounds, help="Of about 20 ms; the median counts.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", parser=_checked(_parse_output), help="For every figure.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", parser=_checked(_parse_plot), help="For time over size.")
]


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
    rounds: Rounds = 5,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Measures a collective and its peers in one run, as nccl-tests does; every result is checked first.

    Starts its ranks itself (by default one a core, 2 to 8), or joins those of torchrun or mpirun. Exit code 1 if a rank
    failed or a result was wrong.
    """
    launch = Launch.from_env()
    world_size = _world_size(nproc, launch)
    mpis = find_mpis()
    try:
        chosen = parse_peers(peers, mpis)
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
    if joined(launch):
        report = _measure_joined(work, chosen, rounds, launch)
    else:
        report = _measure_spawned(work, chosen, rounds, mpis)
    if report is not None:
        if "mpi" in peers.split(",") and not mpis:
            report.notes.append("mpi: n/a, no MPI and mpi4py are installed here")
        _write(report, work[0], json_file, plot_file)
        raise typer.Exit(0 if report.right else 1)


def _world_size(nproc: int | None, launch: Launch) -> int:
    ranks = joined(launch)
    if ranks is None:
        return nproc or min(max(usable_cores(), 2), 8)
    if nproc is not None and nproc != ranks:
        raise typer.BadParameter(f"{nproc} ranks, but the launcher started {ranks}; leave it out", param_hint="--nproc")
    return ranks


def _measure_spawned(work: list[Case], peers: list[str], rounds: int, mpis: dict[str, MPIInstallation]) -> Report:
    """Starts the ranks. An error prints what was measured up to then."""
    report = new_report(work[0].world_size, rounds, mpis)
    try:
        _run(start_teams(peers, work[0].world_size, mpis), work, report)
    except SymmCommError as error:
        _print_table(report)
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    return report


def _measure_joined(work: list[Case], peers: list[str], rounds: int, launch: Launch) -> Report | None:
    """On ranks that a launcher started; the report is rank 0's. An error ends the process, the launcher the rest."""
    peers, notes = present(peers, launch)
    report = new_report(work[0].world_size, rounds, {})
    report.notes += notes
    try:
        ranks = Ranks([*OWN, *peers])
        if ranks.rank != 0:
            ranks.follow()
            return None
        _run([ranks], work, report)
    except BaseException:  # whatever it is, nobody is left waiting
        _print_table(report)
        traceback.print_exc()
        end_now()
    return report


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
        console.print(table(report.measurements))
    for note in [*report.notes, *refusals(report.measurements)]:
        console.print(f"# {note}", markup=False)


def _write(report: Report, first: Case, json_file: Path | None, plot_file: Path | None) -> None:
    machine = report.machine
    ranks = f"{first.world_size} ranks on {machine['usable_cores']} cores of {machine['cpu']}"
    print(f"# {first.collective.value}, {ranks}, median of {report.rounds} rounds")
    _print_table(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if plot_file is not None:
        title = f"{first.collective.value}, {first.dtype.name}, {first.world_size} ranks, {machine['cpu']}"
        plot(report.measurements, title, plot_file)


@app.command()
def doctor(
    nproc: Nproc = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Says what was found, which paths are possible, and why the others are not.

    With --nproc, also starts ranks and lets them reduce; exit code 1 if they do not agree.
    """
    diagnosis = doctors.examine(nproc)
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
        Path | None, typer.Option("--output", metavar="FILE", parser=_checked(_parse_output), help="The table.")
    ] = None,
) -> None:
    """Measures at which sizes GPU kernels change best, and writes the table that later runs read (SYMMCOMM_TUNING).

    Starts a rank a GPU by torchrun, or joins the ranks of a launcher.
    """
    launch = Launch.from_env()
    if joined(launch) is None:
        script = ["-m", "symmcomm", "tune", *(["--output", str(output)] if output else [])]
        ranks = ["--standalone", "--nproc-per-node", str(nproc) if nproc else "gpu"]
        raise typer.Exit(subprocess.run([sys.executable, "-m", "torch.distributed.run", *ranks, *script]).returncode)
    settings = Settings.from_env()
    path = output or Path(settings.tuning).expanduser()
    comm = tuning.join(launch, settings)
    thresholds = tuning.tune(comm, print if comm.rank == 0 else lambda _: None)
    tuning.write(comm, thresholds, path)
    if comm.rank == 0:
        print(f"{comm.gpu_side.tuned_for}\n{thresholds}\nwritten to {path}")
    comm.close()


def main() -> None:
    """Entry point of the ``symmcomm`` command."""
    try:
        app(prog_name="symmcomm")
    except SymmCommError as error:  # such as a SYMMCOMM_* variable that does not parse
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
