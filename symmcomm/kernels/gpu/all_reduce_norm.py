"""All-reduce or reduce-scatter of many rows, residual and RMSNorm in one kernel, of any tensors.

Formulas in ``norm_row``; slots, signals and when a slot may be filled again: ``staged``. A chunk is ``rows``
neighbouring rows, one for each team of the CTA, or one of several ``pieces`` of a row that is longer than a slot. A
rank pushes its rows into all peers' staging memory, adds up what they have pushed and its own in rank order, adds the
residual, and norms: so all ranks come to the same bits. That is one shot, which sends world_size - 1 times the data:
between two ranks as much as any all-reduce must send, and nothing has to be sent back.

With ``scatter`` rank r gets rows r · c up to (r + 1) · c of the sum, c = ⌈rows / world_size⌉, and only those are sent
to it. Rows that are missing in the last parts have chunks of nothing: all ranks have the same number.

What does not come from peers is loaded before a wait: by senders what they send next, by takers the own row and the
residual. Takers norm a row together, so they also stop together. Outputs may be the inputs: a row is taken once it has
been pushed, and is read by the threads that write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from symmcomm.kernels.gpu.access import VECTOR_BYTES, load_or_zero
from symmcomm.kernels.gpu.context import Context, after_previous_kernel, begin, block, end, thread
from symmcomm.kernels.gpu.norm_row import Math, NormArguments, Rows, placeholders
from symmcomm.kernels.gpu.primitives import agree, pick, store
from symmcomm.kernels.gpu.registers import keep, kept_in, registers
from symmcomm.kernels.gpu.staged import Crews, cta_threads
from symmcomm.kernels.gpu.team import Team
from symmcomm.schedule.dtypes import DType
from symmcomm.schedule.layout_gpu import Layout

_WEIGHTS = 4  # vectors that registers hold beside a row
_SENDERS = 128
Words = list[list[Any]]  # a thread's vectors, each four words


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Where a vector belongs: to the row of a ``team`` of takers, as its vector ``index``; and ``place`` in a slot."""

    team: Any
    index: Any
    place: Any


@dataclass(frozen=True, kw_only=True)
class RowExchange:
    """The rows on their way. A chunk has ``vectors`` of each taker; ``senders`` share them without regard to rows."""

    ctx: Context
    rows: Rows
    num_teams: int
    pieces: int
    vectors: int
    senders: int
    scatter: bool

    @property
    def takers(self) -> int:
        """Threads."""
        return self.rows.team.threads * self.num_teams

    @property
    def team(self) -> Any:
        """A taker's."""
        return thread() // self.rows.team.threads

    @property
    def part_rows(self) -> Any:
        """Rows that every rank gets, the last ranks' excepted."""
        rows, size = self.rows.arguments.rows, self.ctx.world_size
        return (rows + (size - 1)) // size if self.scatter else rows

    @property
    def turns(self) -> Any:
        """Rows that each team has, with missing ones."""
        before, step = block() * self.num_teams, cute.arch.grid_dim()[0] * self.num_teams
        left = self.part_rows - before
        return pick(left > 0, (left + (step - 1)) // step, Int32(0))

    def row(self, turn: Any, team: Any) -> Any:
        """The team's row of that turn, in a part."""
        return (turn * cute.arch.grid_dim()[0] + block()) * self.num_teams + team

    def row_of(self, hop: int, turn: Any, team: Any) -> tuple[Any, Any]:
        """That row in the part of the rank ``hop`` further on: its number in the source, and whether there is one."""
        row = self.row(turn, team)
        number = self.ctx.neighbour(hop) * self.part_rows + row if self.scatter else row
        return number, (row < self.part_rows) & (number < self.rows.arguments.rows)

    @property
    def outgoing(self) -> list[int]:
        """How far on the ranks are whose parts differ, the own one excepted."""
        return list(range(1, self.ctx.world_size)) if self.scatter else [0] * (self.ctx.world_size > 1)

    def spot(self, place: Any, piece: Any) -> Spot:
        """Of a place in the slot of a piece."""
        of_team = self.rows.team.threads * self.vectors
        return Spot(team=place // of_team, index=piece * of_team + place % of_team, place=place)

    def taken(self, piece: Any) -> list[Spot]:
        """A taker's vectors of a piece: ``Rows.indices``."""
        threads = self.rows.team.threads
        first = self.team * (threads * self.vectors) + thread() % threads
        return [self.spot(first + v * threads, piece) for v in range(self.vectors)]

    def sent(self, piece: Any) -> list[Spot]:
        """A sender's; the last ones may be beyond the slot."""
        num = -(-self.takers * self.vectors // self.senders)
        return [self.spot(thread() - self.takers + v * self.senders, piece) for v in range(num)]

    def is_there(self, spot: Spot, exists: Any) -> Any:
        """Whether there is such a vector, if the row ``exists``."""
        return exists & self.rows.access.inside(spot.index) & (spot.team < self.num_teams)

    def source(self, hop: int, turn: Any, spots: list[Spot]) -> Words:
        """Vectors of this rank's input, in the part of the rank ``hop`` further on."""
        given, loaded = self.rows.arguments, []
        for spot in spots:
            number, exists = self.row_of(hop, turn, spot.team)
            row, exists = given.source + Int64(number) * given.source_pitch, exists & (spot.team < self.num_teams)
            loaded.append(self.rows.access.load(row, spot.index, exists))
        return loaded

    @property
    def num_fetched(self) -> int:
        """Vectors that ``fetch`` gives."""
        return len(self.outgoing) * -(-self.takers * self.vectors // self.senders)

    def fetch(self, chunk: Any) -> Words:
        """A sender's vectors of a chunk; zeros where there is none."""
        turn, spots = chunk // self.pieces, self.sent(chunk % self.pieces)
        return [words for hop in self.outgoing for words in self.source(hop, turn, spots)]

    def send(self, fetched: Words, chunk: Any, number: Any) -> None:
        """Stores them into the peers' slots of that number."""
        ctx, turn, spots = self.ctx, chunk // self.pieces, self.sent(chunk % self.pieces)
        for hop in range(1, ctx.world_size):
            slot = ctx.staging_slot(ctx.neighbour(hop), block(), number, ctx.rank)
            part, first = (hop, (hop - 1) * len(spots)) if self.scatter else (0, 0)
            for words, spot in zip(fetched[first:], spots, strict=False):
                here = self.is_there(spot, self.row_of(part, turn, spot.team)[1])
                store(slot + Int64(spot.place) * VECTOR_BYTES, words, when=here)

    def own(self, turn: Any, piece: int) -> Words:
        """A taker's vectors of a piece: of this rank, and of its residual."""
        given, spots, (_, exists) = self.rows.arguments, self.taken(piece), self.row_of(0, turn, self.team)
        residual = given.residual + Int64(self.row(turn, self.team)) * given.residual_pitch
        return self.source(0, turn, spots) + [self.rows.access.load(residual, each.index, exists) for each in spots]

    def came(self, turn: Any, piece: int, number: Any) -> Words:
        """The same of ``ctx.senders``, from their slots of that number."""
        ctx, loaded, spots, (_, exists) = self.ctx, [], self.taken(piece), self.row_of(0, turn, self.team)
        for peer in ctx.senders:
            slot = ctx.staging_slot(ctx.rank, block(), number, peer)
            for spot in spots:
                here = self.is_there(spot, exists) & (peer != ctx.rank)
                loaded.append(load_or_zero(slot + Int64(spot.place) * VECTOR_BYTES, VECTOR_BYTES, here, "relaxed"))
        return loaded

    def add(self, turn: Any, piece: int, loaded: Words) -> list[list[Any]]:
        """The values t of a taker's vectors of a piece, from what ``own`` and ``came`` gave; the new residual is
        stored."""
        given, math, num = self.rows.arguments, self.rows.math, self.vectors
        _, exists = self.row_of(0, turn, self.team)
        new, values = given.new_residual + Int64(self.row(turn, self.team)) * given.new_residual_pitch, []
        for v, spot in enumerate(self.taken(piece)):
            ranks = self.ctx.in_rank_order(loaded[v], loaded[2 * num + v :: num])
            added, rounded = math.add_residual(math.sum_of(ranks), loaded[num + v])
            self.rows.access.store(new, spot.index, rounded, exists)
            values.append(added)
        return values

    def write(self, values: list[list[Any]], turn: Any) -> None:
        """Norms and stores the team's row. The weight is loaded before the sum is known: what is acquired empties the
        L1 cache, so it comes from the L2."""
        given, indices, (_, exists) = self.rows.arguments, self.rows.indices, self.row_of(0, turn, self.team)
        row = Int64(self.row(turn, self.team))
        output, scale = given.output + row * given.output_pitch, given.scales + row * 4
        weights = self.rows.weights(indices) if self.rows.held is None and len(indices) <= _WEIGHTS else None
        self.rows.write(values, exists, turn * self.rows.turns, [output], [scale], weights=weights)

    @cute.jit
    def push_all(self, crews: cutlass.Constexpr, num: Int32, fetched: cutlass.Constexpr) -> None:
        """What senders do. ``fetched``: registers that hold what ``fetch`` gives of the first of ``num`` chunks."""
        chunk, met = Int32(0), Boolean(True)
        while chunk < num and met:
            met = crews.may_push(chunk)
            if met:
                self.send(kept_in(fetched, self.num_fetched, 4), chunk, crews.epoch + Uint32(chunk))
                crews.count(chunk)
                keep(fetched, self.fetch(chunk + 1))
            chunk += 1

    @cute.jit
    def take_all(self, crews: cutlass.Constexpr, turns: Int32) -> None:
        """What takers do."""
        turn, met, size = Int32(0), Boolean(True), self.rows.math.per_vector * self.vectors
        values = registers(self.pieces * size, Float32)
        while turn < turns and met:
            for piece in cutlass.range_constexpr(self.pieces):
                if met:
                    chunk = turn * self.pieces + piece
                    own = self.own(turn, piece)
                    met = agree(crews.may_take(chunk), crews.takers)
                    if met:
                        came = self.came(turn, piece, crews.epoch + Uint32(chunk))
                        keep(values, self.add(turn, piece, own + came), piece * size)
                        crews.count(chunk)
                        if cutlass.const_expr(piece == self.pieces - 1):
                            self.write(kept_in(values, self.pieces * self.vectors, self.rows.math.per_vector), turn)
            turn += 1


@dataclass(frozen=True, kw_only=True)
class AllReduceNormStaged:
    """The kernel. Attributes:

        threads: a row: a power of two up to 32, or whole warps.
        rows: a chunk; ``threads · rows`` are takers (see ``staged``), whole warps.
        vectors: of 16 bytes a thread and chunk; ``16 · threads · rows · vectors`` fit ``staging_slot_bytes``.
        pieces: chunks that hold a row, ``threads · vectors`` each; 1 unless ``rows`` is.
        scatter: see above. aligned, bias, quantize, pdl: as of ``RMSNorm``.
    """

    dtype: DType
    world_size: int
    arch: int
    threads: int
    rows: int
    vectors: int
    pieces: int
    aligned: bool
    scatter: bool = False
    bias: bool = False
    quantize: bool = False
    pdl: bool = False

    @property
    def crews(self) -> tuple[int, int]:
        """Takers, and as few senders as can fill the link: the registers are for those who hold rows."""
        takers = self.threads * self.rows
        return takers, min(takers, _SENDERS)

    def arguments(self) -> tuple[Any, ...]:
        """Placeholders for ``compile``."""
        return (Int64(0), Int64(0), Int32(0), placeholders(), Int32(1))

    @cute.jit
    def __call__(
        self, base: Int64, stride: Int64, rank: Int32, tensors: NormArguments, grid: Int32, stream: cuda.CUstream
    ) -> None:
        """``grid``: at most NUM_STAGED_CHANNELS, and CTAs that fit the device at once; the same on all ranks. With
        ``scatter`` all tensors but the source hold the rank's part."""
        self.kernel(base, stride, rank, tensors).launch(
            grid=(grid, 1, 1), block=(cta_threads(*self.crews), 1, 1), min_blocks_per_mp=1,
            use_pdl=self.pdl, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, base: Int64, stride: Int64, rank: Int32, tensors: NormArguments) -> None:
        ctx = Context(base, stride, rank, Layout.create(self.world_size))
        math = Math(dtype=self.dtype, world_size=self.world_size, arch=self.arch, quantize=self.quantize)
        indices = [thread() % self.threads + v * self.threads for v in range(self.pieces * self.vectors)]
        takers, senders = self.crews
        team = Team.create(self.threads, num_teams=self.rows, crew=takers)
        rows = Rows.create(math, team, indices, self.aligned, self.bias, tensors)
        shape = {"num_teams": self.rows, "pieces": self.pieces, "vectors": self.vectors, "senders": senders}
        job = RowExchange(ctx=ctx, rows=rows, scatter=self.scatter, **shape)
        fetched = registers(4 * job.num_fetched, Uint32)
        after_previous_kernel(self.pdl)
        if thread() >= takers:
            keep(fetched, job.fetch(Int32(0)))
        in_order, epoch = begin(ctx, block())
        turns, num = job.turns, job.turns * self.pieces
        if in_order and turns > 0:
            crews = Crews.muster(ctx, epoch, takers, senders)
            if crews.is_taker:
                job.take_all(crews, turns)
            elif crews.is_sender:
                job.push_all(crews, num, fetched)
            else:
                crews.signal_all(num)
            end(ctx, block(), epoch + Uint32(num))
