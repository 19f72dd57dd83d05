"""Options of the ``symmcomm`` command, and the parsers that turn a wrong one into a usage error."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from symmcomm.bench.method import Device, Timing
from symmcomm.bench.run import PEERS
from symmcomm.env import parse_bytes
from symmcomm.errors import ArgumentError
from symmcomm.schedule.dtypes import DType, Op

MAX_RANKS = 64
MAX_VIRTUAL = 16
_IMAGE_SUFFIXES = (".png", ".svg", ".pdf")


def checked(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A parser whose ArgumentError becomes a usage error. Defaults pass as they are."""

    def parser(text: Any) -> Any:
        try:
            return parse(text) if isinstance(text, str) else text
        except ArgumentError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


def parse_dtype(text: str) -> DType:
    if text not in DType.__members__:
        raise ArgumentError(f"{text!r} is not a dtype: expected one of {', '.join(DType.__members__)}")
    return DType[text]


def parse_op(text: str) -> Op:
    if text not in Op.__members__:
        raise ArgumentError(f"{text!r} is not a reduction: expected one of {', '.join(Op.__members__)}")
    return Op[text]


def parse_output(text: str) -> Path:
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir():
        raise ArgumentError(f"{text!r} cannot be written: it is a folder")
    if not folder.is_dir():
        raise ArgumentError(f"{text!r} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentError(f"{text!r} cannot be written: permission denied")
    return path


def parse_plot(text: str) -> Path:
    if Path(text).suffix not in _IMAGE_SUFFIXES:
        raise ArgumentError(f"{text!r} has no suffix out of {', '.join(_IMAGE_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("a plot needs matplotlib: install symmcomm with the extra 'plot'")
    return parse_output(text)


def _check_ranks(nproc: int | None) -> int | None:
    if nproc is not None and not 1 <= nproc <= MAX_RANKS:
        raise typer.BadParameter(f"{nproc} is not in 1..{MAX_RANKS}")
    return nproc


def _check_rounds(rounds: int | None) -> int | None:
    if rounds is not None and rounds < 1:
        raise typer.BadParameter(f"{rounds} is not positive")
    return rounds


def _check_virtual(ranks: int) -> int:
    if ranks and not 2 <= ranks <= MAX_VIRTUAL:
        raise typer.BadParameter(f"{ranks} is not in 2..{MAX_VIRTUAL}")
    return ranks


Nproc = Annotated[
    int | None, typer.Option("--nproc", callback=_check_ranks, help=f"Ranks to start, up to {MAX_RANKS}.")
]
Begin = Annotated[
    int,
    typer.Option("--begin", "-b", metavar="SIZE", parser=checked(parse_bytes), show_default="1K", help="First size."),
]
End = Annotated[
    int,
    typer.Option("--end", "-e", metavar="SIZE", parser=checked(parse_bytes), show_default="64M", help="Last size."),
]
Factor = Annotated[float, typer.Option("--factor", "-f", help="Ratio of each size to the one before.")]
Dtype = Annotated[
    DType,
    typer.Option(
        "--dtype", "-d", metavar="NAME", parser=checked(parse_dtype), show_default="float32",
        help=f"Out of {', '.join(DType.__members__)}.",
    ),
]
Reduction = Annotated[
    Op,
    typer.Option(
        "--op", metavar="NAME", parser=checked(parse_op), show_default="sum",
        help=f"Out of {', '.join(Op.__members__)}.",
    ),
]
Peers = Annotated[
    str,
    typer.Option(
        "--peers", metavar="NAMES",
        help=f"On CPUs out of {', '.join(PEERS[Device.cpu])}; mpi is every MPI installed. On GPUs out of "
        f"{', '.join(PEERS[Device.cuda])}; torch_symm_mem is both of torch's.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds", callback=_check_rounds, help="Timed rounds; medians are reported. Default: 5 on CPUs, 20 on GPUs."
    ),
]
OnDevice = Annotated[
    Device | None, typer.Option("--device", help="Default: cuda where there are two GPUs or more.")
]
Timed = Annotated[
    Timing | None,
    typer.Option("--timing", help="On GPUs: calls in a CUDA graph, or made by the host. Default: graph."),
]
ColdL2 = Annotated[bool, typer.Option("--cold-l2", help="On GPUs: flush the L2 cache before every call.")]
ShareGpu = Annotated[bool, typer.Option("--share-gpu", help="Let several ranks use one GPU.")]
VirtualRanks = Annotated[
    int,
    typer.Option(
        "--virtual-ranks", metavar="W", callback=_check_virtual,
        help=f"W ranks as streams of one GPU, up to {MAX_VIRTUAL}: no link in between, symmcomm alone.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", parser=checked(parse_output), help="Write all figures to FILE.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", parser=checked(parse_plot), help="Plot time over size to FILE.")
]
