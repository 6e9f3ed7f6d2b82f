"""Goes through every layout of a search: counts what is refused, prices the rest by column.

The formulas are those of an estimate but for one: a pipeline is not played, but priced by the
closed formula of its schedule.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from phalanx.core.layout import Layout
from phalanx.cost.activation_memory import ActivationMemory
from phalanx.cost.compute import Passes
from phalanx.cost.groups import Routes
from phalanx.cost.holdings import Holdings
from phalanx.cost.memory import PlainMoments
from phalanx.cost.messages.frameworks import messages_of
from phalanx.cost.operator import UnitName
from phalanx.cost.parameter_memory import ParameterMemory, WholeUnits
from phalanx.cost.ranks import ParameterCounts, PipelineRanks
from phalanx.cost.table import Booleans, Column, Floats, Integers, Table, some_rows
from phalanx.planner.columns import different
from phalanx.planner.data_axis import (
    Exchange,
    OverlapBudget,
    StepMessages,
    optimizer_seconds,
    with_jitter,
)
from phalanx.planner.kinds import RankKinds, busiest
from phalanx.planner.space import (
    EXPERTS,
    MEMORY,
    Choices,
    Limits,
    Rows,
    Sharding,
    choices,
    meshes,
    refuse_schedules,
    shardings,
    space,
)
from phalanx.planner.unit_tables import BlockTables, Seconds, UnitTables
from phalanx.planner.units import Units, weights_shown
from phalanx.planner.workload import Workload
from phalanx.schedules.formulas import Peaks, Pipes
from phalanx.schedules.formulas import Seconds as StageSeconds

BLOCK = 1 << 16  # layouts at once: their columns stay in the cache


@dataclass(frozen=True, kw_only=True)
class Request(Workload):
    """What is looked for.

    Attributes:
        limits: allowed values by key of the layout.
        top: how many meshes are wanted.
    """

    limits: Limits = field(default_factory=dict)
    top: int = 10


class Block(NamedTuple):
    """Some rows with one ZeRO stage, and their prices; tables are of shape (rows, shardings)."""

    rows: Rows
    sharding: Sharding
    seconds: Floats
    peaks: Floats
    fits: Booleans


class Smallest(NamedTuple):
    """The layout that needs the least memory, and how much."""

    layout: Layout
    bytes: float


@dataclass(frozen=True)
class Group:
    """What depends on degrees, sharding and blocks of a rank alone: a small table of its own.

    Attributes:
        sharding: the ways to shard.
        state: bytes that stay, for each kind of rank.
        whole: units that are whole, for each kind of rank.
        kept: parameters that the optimizer of the busiest rank moves.
        around: seconds of what ZeRO sends around each unit; none where it sends nothing there.
        exchange: what is sent once a step.
        allowed: whether experts can be spread so.
    """

    sharding: Sharding
    state: tuple[Floats, ...]
    whole: tuple[WholeUnits, ...]
    kept: Floats
    around: dict[UnitName, Passes]
    exchange: Exchange
    allowed: Booleans


class Few(NamedTuple):
    """What rows have in common, once for each that differs: the table behind `Group`.

    Attributes:
        table: columns of shape (few, 1).
        variant: of each, of shape (few,).
        blocks: of each kind of rank.
        params: of each unit.
    """

    table: Table
    variant: Integers
    blocks: tuple[PipelineRanks, ...]
    params: ParameterCounts


class Sized(NamedTuple):
    """Rows and what they hold.

    Attributes:
        rows: the layouts.
        group: the place of each in the tables of its groups.
        ranks: bytes of every kind of rank beside its parameters, of shape (rows, 1).
    """

    rows: Rows
    group: Integers
    ranks: tuple[PlainMoments, ...]

    def take(self, which: Integers) -> "Sized":
        """Some of the rows."""
        ranks = tuple(rank.take(which) for rank in self.ranks)
        return Sized(self.rows.take(which), self.group[which], ranks)


class Sweep:
    """All layouts of a request.

    Attributes:
        considered: layouts that divide; complete, as all counts are, at the end of `priced`.
        refused: how many of them are refused, by reason.
        feasible: how many fit.
        bar: seconds; whoever takes blocks may lower it, and what cannot be faster is counted from
            then on, but not priced.

    Raises:
        RefusedError: a limit leaves nothing that divides, or the devices lack the number format.
    """

    def __init__(self, request: Request) -> None:
        _ = request.machine
        self.request = request
        self.where = space(request, request.limits)
        self.kinds = RankKinds.of(request.shape, [v.layout for v in self.where.variants])
        self._meshes = meshes(self.where)
        self.refused: Counter[str] = Counter()
        self.considered = self.feasible = 0
        self.bar = math.inf

    def priced(self) -> Iterator[Block]:
        """Price what fits."""
        units = None
        for sized, groups in self._sized():
            few = self._fitting(sized, groups)
            if not len(few.rows):
                continue
            if units is None:
                units = UnitTables.of(self.where, self._meshes)
            pipes = Pipelines.of(self, few, units)
            least = pipes.seconds(pipes.inner)[:, 0]
            for group in groups:
                yield from self._block(pipes, group, least)

    def smallest(self) -> Smallest | None:
        """The layout that needs the least memory; None if everything is refused before."""
        best: Smallest | None = None
        for sized, groups in self._sized():
            for group in groups:
                peaks = np.where(group.allowed[sized.group], self._peaks(sized, group), np.inf)
                row, shard = np.unravel_index(int(peaks.argmin()), peaks.shape)
                if peaks[row, shard] < (np.inf if best is None else best.bytes):
                    size = int(group.sharding.shards[0, shard])
                    layout = self.where.layout(sized.rows, int(row), group.sharding.zero, size)
                    best = Smallest(layout, float(peaks[row, shard]))
        return best

    def _sized(self) -> Iterator[tuple[Sized, list[Group]]]:
        """Everything that the model and the schedules allow, with the ways to shard it."""
        rows = self._meshes
        if not len(rows):
            return
        more = choices(self.where, rows)
        weights = more.weights(rows)
        self.considered = int(weights.sum())
        rules = ((rule.reason, rule.refuses(rows.table)) for rule in self.where.rules)
        rows = self._sieve(rows, weights, rules)
        self._meshes = rows = replace(rows, mesh=np.arange(len(rows)))
        if not len(rows):
            return
        self._blocks = BlockTables.of(self.where, rows)
        for dp in _from_the_middle(np.unique(rows.table.dp).tolist()):
            options = shardings(dp, self.where.limits)
            if options:
                yield from self._of_replicas(rows.take(rows.table.dp == dp), more, options)

    def _of_replicas(
        self, rows: Rows, more: Choices, options: Sequence[Sharding]
    ) -> Iterator[tuple[Sized, list[Group]]]:
        """The rows of one dp, in blocks."""
        rows = more.add_schedules(rows)
        weights = more.weights_of_schedules(rows)
        rows = more.add_switches(self._sieve(rows, weights, refuse_schedules(self.where, rows)))
        if not len(rows):
            return
        few, place = self._few(rows)
        groups = [self._group(few, option) for option in options]
        step = max(BLOCK // max(option.shards.size for option in options), 1)
        for first in range(0, len(rows), step):
            which = np.arange(first, min(first + step, len(rows)))
            yield self._size(rows.take(which), place[which], few), groups

    def _sieve(
        self, rows: Rows, weights: Integers, reasons: Iterable[tuple[str, Booleans]]
    ) -> Rows:
        """Drop what is refused, and count all that it stands for."""
        left = np.ones(len(rows), dtype=np.bool_)
        for reason, refused in reasons:
            self.refused[reason] += int(weights[refused & left].sum())
            left &= ~refused
        return rows if left.all() else rows.take(left)

    def _few(self, rows: Rows) -> tuple[Few, Integers]:
        """What rows have in common, and the place of each row among it."""
        table = rows.table
        first, place = different([table.tp, table.cp, table.ep, table.sp * 1, rows.variant])
        some = rows.take(first)
        tall, kinds = some.table.tall, self.kinds.kinds(some.variant)
        blocks = tuple(self.kinds.blocks_of(some.variant, kind).tall for kind in range(kinds))
        params = ParameterCounts.of(tall, blocks[0].together)
        return Few(tall, some.variant, blocks, params), place

    def _group(self, few: Few, sharding: Sharding) -> Group:
        """Bytes of parameters and seconds of the data axis, for some ways to shard."""
        request, zero = self.request, np.array([[sharding.zero]])
        framework = request.framework
        table = replace(few.table, zero=zero, shards=sharding.shards)
        held = [
            ParameterMemory(table, blocks, few.params, framework.stack, zero)
            for blocks in few.blocks
        ]
        ends = Holdings({}, self.kinds.copies[few.variant][:, None], few.blocks[0].together > 0)
        messages = messages_of(table, framework, axes=_of_step(request), held=ends)
        routes = Routes(table, framework, request.fabric)
        units = Units(request, table, few.params, messages, routes)
        first = few.blocks[0]
        counts = {
            "embedding": first.first,
            "dense block": first.dense,
            "routed block": first.routed,
            "head": first.last,
        }
        kept = [h.parameters_kept if sharding.zero else h.shared + h.experts for h in held]
        fits = True
        if framework.sends_as_ledger and request.shape.is_moe:
            fits = sharding.shards * table.cp % table.ep == 0
        shape = (len(few.variant), sharding.shards.size)
        return Group(
            sharding=sharding,
            state=tuple(np.broadcast_to(sum(h.state), shape) for h in held),
            whole=tuple(h.whole_units for h in held),
            kept=np.broadcast_to(reduce(np.maximum, kept), shape),
            around={unit: units.around(unit) for unit in _UNITS if sharding.zero >= 2},
            exchange=StepMessages(messages, counts, routes).exchange(self._units_of(few)),
            allowed=np.broadcast_to(fits, shape),
        )

    def _units_of(self, few: Few) -> Column:
        """How many units the stages of the first rank have."""
        dense, routed = self.kinds.first_dense, self.kinds.first_routed
        first = 1 + dense[few.variant] + routed[few.variant]
        return (first[:, None] + (few.table.pp == 1)) * few.table.v

    def _size(self, rows: Rows, place: Integers, few: Few) -> Sized:
        table, of_block = rows.table, self._blocks.blocks(rows)
        params, sizes = few.params.take(place), Peaks(table.pp, table.m, table.v, table.pp)
        ranks = []
        for kind in range(self.kinds.kinds(rows.variant)):
            blocks = self.kinds.blocks_of(rows.variant, kind).tall
            in_flight = self.kinds.in_flight(rows.variant, kind, sizes)[:, None]
            held = ActivationMemory(of_block.table, blocks, params, in_flight, of_block)
            ranks.append(PlainMoments.of(held))
        return Sized(rows, place, tuple(ranks))

    def _fitting(self, sized: Sized, groups: Sequence[Group]) -> Sized:
        """What no way to shard would make fit is refused, with all of them."""
        least, stack = None, self.request.framework.stack
        for kind, rank in enumerate(sized.ranks):
            state = reduce(np.minimum, (group.state[kind].min(axis=1) for group in groups))
            here = rank.peak(WholeUnits(), state[sized.group][:, None], stack)
            least = here if least is None else np.maximum(least, here)
        assert least is not None, "every row has a rank"
        fits = np.flatnonzero(least[:, 0] <= self.request.capacity)
        ways = sum(group.sharding.shards.size for group in groups)
        self.refused[MEMORY] += ways * (len(least) - len(fits))
        return sized if len(fits) == len(least) else sized.take(fits)

    def _peaks(self, sized: Sized, group: Group) -> Floats:
        """Bytes of the worst rank, of shape (rows, shardings)."""
        worst, stack = None, self.request.framework.stack
        for kind, rank in enumerate(sized.ranks):
            whole = group.whole[kind].take(sized.group)
            here = rank.peak(whole, group.state[kind][sized.group], stack)
            worst = here if worst is None else np.maximum(worst, here)
        result: Floats = np.asarray(worst)
        return result

    def _block(self, pipes: "Pipelines", group: Group, least: Floats) -> Iterator[Block]:
        sized = pipes.sized
        peaks, allowed = self._peaks(sized, group), group.allowed[sized.group]
        self.refused[EXPERTS] += int(allowed.size - allowed.sum())
        fits = (peaks <= self.request.capacity) & allowed
        self.feasible += int(fits.sum())
        self.refused[MEMORY] += int(allowed.sum() - fits.sum())
        rows = np.flatnonzero(fits.any(axis=1) & (least < self.bar))
        if len(rows):
            few = pipes if len(rows) == len(fits) else pipes.take(rows)
            seconds = few.step_seconds(group)
            yield Block(few.sized.rows, group.sharding, seconds, peaks[rows], fits[rows])


@dataclass(frozen=True)
class Pipelines:
    """Rows whose seconds are asked for.

    Attributes:
        sweep: where they come from.
        sized: the rows.
        inner: one micro-batch through each unit, but for what ZeRO sends around it.
        hop: seconds to carry one tensor to another rank, of shape (rows, 1).
    """

    sweep: Sweep
    sized: Sized
    inner: Seconds
    hop: Floats

    @classmethod
    def of(cls, sweep: Sweep, sized: Sized, units: UnitTables) -> "Pipelines":
        """Look the seconds of units up."""
        together = sweep.kinds.blocks.together[sized.rows.variant, 0]
        inner = units.seconds(sized.rows, together)
        return cls(sweep, sized, inner, units.hops(sized.rows))

    def take(self, which: Integers) -> "Pipelines":
        """Some of the rows."""
        sized = self.sized._replace(
            rows=self.sized.rows.take(which), group=self.sized.group[which], ranks=()
        )
        inner = {unit: Passes(*(c[which] for c in passes)) for unit, passes in self.inner.items()}
        return Pipelines(self.sweep, sized, inner, self.hop[which])

    def seconds(self, units: Seconds) -> Floats:
        """From the first forward to the last backward, with such seconds of each unit."""
        sweep, rows, table = self.sweep, self.sized.rows, self.sized.rows.table.tall
        shape = sweep.request.shape
        every = units["dense block"].times(shape.layers - shape.moe_layers)
        if shape.is_moe:
            every = every.plus(units["routed block"].times(shape.moe_layers))
        every = every.plus(units["embedding"]).plus(units["head"])
        stage = every.times(1 / (table.pp * table.v))
        totals = {unit: passes.total for unit, passes in units.items()}
        pipes = Pipes(
            p=table.pp.astype(np.float64),
            m=table.m.astype(np.float64),
            v=table.v.astype(np.float64),
            passes=StageSeconds(*stage),
            worst=busiest(sweep.kinds, rows.variant, totals),
            total=every.total,
            hop=self.hop,
        )
        return sweep.kinds.makespans(pipes, rows.variant)

    def step_seconds(self, group: Group) -> Floats:
        """One optimizer step, of shape (rows, shardings)."""
        request, place = self.sweep.request, self.sized.group
        table, units = self.sized.rows.table.tall, dict(self.inner)
        for unit, around in group.around.items():
            if unit in units:
                sent = Passes(*(some_rows(column, place) for column in around))
                units[unit] = units[unit].plus(weights_shown(request, units[unit], sent))
        exchange = group.exchange.take(place)
        body = self.seconds(units) + optimizer_seconds(request, table, group.kept[place])
        for shown in exchange.shown(request, self._budget(units)).values():
            body = body + shown
        lasts: Floats = body + with_jitter(request, table, body)
        return lasts

    def _budget(self, units: Seconds) -> OverlapBudget:
        """One micro-batch on the first rank; only the first of its stages counts, v times."""
        kinds, variant = self.sweep.kinds, self.sized.rows.variant
        table = self.sized.rows.table.tall
        dense, routed = kinds.first_dense[variant][:, None], kinds.first_routed[variant][:, None]
        alone = (table.pp == 1) * 1
        first = units["dense block"].times(dense).plus(units["embedding"])
        first = first.plus(units["head"].times(alone))
        if "routed block" in units:
            first = first.plus(units["routed block"].times(routed))
        return OverlapBudget(first.times(table.v), (1 + dense + routed + alone) * table.v)


_UNITS: tuple[UnitName, ...] = ("embedding", "dense block", "routed block", "head")


def _of_step(request: Request) -> tuple[str, ...]:
    """The axes that send something once a step."""
    if not request.framework.sends_as_ledger:
        return ("data",)
    return ("data", "tensor", "pipeline", "precision", "expert", "world")


def _from_the_middle(values: list[int]) -> list[int]:
    """The middle of ascending values first: a good layout is found soon, and many need no price."""
    places = range(len(values))
    return [values[place] for place in sorted(places, key=lambda i: abs(2 * i - len(values)))]
