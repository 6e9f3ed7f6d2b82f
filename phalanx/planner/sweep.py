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
from phalanx.cost.block_memory import BlockMemory
from phalanx.cost.memory import PlainMoments
from phalanx.cost.parameter_memory import WholeUnits
from phalanx.cost.saved import Stack
from phalanx.cost.table import Booleans, Floats, Integers, Which
from phalanx.planner.columns import different
from phalanx.planner.kinds import RankKinds
from phalanx.planner.prices import Few, Pipelines, ShardedRows, peaks, plain_moments
from phalanx.planner.space import (
    DEGREES,
    MEMORY,
    SCHEDULES,
    SHARDINGS,
    SWITCHES,
    Choices,
    Limits,
    Rows,
    Sharding,
    choices,
    meshes,
    shardings,
    space,
)
from phalanx.planner.unit_tables import MeshTables
from phalanx.planner.workload import Workload

BLOCK = 1 << 17  # layouts at once: their columns stay in the cache
FIRST = 1 << 10  # rows of a dp that are priced before the others
FEW = 2  # ways to shard that are looked at one by one


@dataclass(frozen=True, kw_only=True)
class Request(Workload):
    """What is looked for.

    Attributes:
        limits: allowed values by key of the layout.
        top: how many meshes are wanted.
    """

    limits: Limits = field(default_factory=dict)
    top: int = 10


class PricedRows(NamedTuple):
    """Some rows with one ZeRO stage, and their prices; tables are of shape (rows, shardings).

    Attributes:
        rows: of one dp.
        group: the ways in which they are sharded.
        seconds: of a step, also where a row does not fit.
        peaks: bytes of the worst rank.
        fits: whether a row fits, and may be sharded so.
    """

    rows: Rows
    group: ShardedRows
    seconds: Floats
    peaks: Floats
    fits: Booleans


class Smallest(NamedTuple):
    """The layout that needs the least memory, and how much."""

    layout: Layout
    bytes: float


class Replicas(NamedTuple):
    """The layouts of one dp.

    Attributes:
        rows: not yet sharded; equal schedules stand together.
        place: of each among the few.
        few: what rows have in common.
        groups: every ZeRO stage, with its ways to shard.
        least: bytes of state that no way to shard goes below, for each kind of rank.
    """

    rows: Rows
    place: Integers
    few: Few
    groups: tuple[ShardedRows, ...]
    least: tuple[Floats, ...]

    @property
    def ways(self) -> int:
        """Ways to shard a row."""
        return sum(group.shards.size for group in self.groups)

    def blocks(self) -> Iterator[slice]:
        """All rows, as many at once as stay in the cache with the ways of a group."""
        step = max(BLOCK // max(group.shards.size for group in self.groups), 1)
        for first in range(0, len(self.rows), step):
            yield slice(first, min(first + step, len(self.rows)))


class Sized(NamedTuple):
    """Some rows of one dp and what they hold.

    Attributes:
        which: their places among those rows, ascending.
        place: of each among the few.
        ranks: bytes of every kind of rank beside its parameters, of shape (rows, 1).
    """

    which: Integers
    place: Integers
    ranks: tuple[PlainMoments, ...]

    def take(self, some: Which) -> "Sized":
        """Some of them."""
        ranks = tuple(rank.take(some) for rank in self.ranks)
        return Sized(self.which[some], self.place[some], ranks)


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

    def priced(self) -> Iterator[PricedRows]:
        """Price what fits: of each dp first the rows that may be fastest, which lowers the bar."""
        for same in self._replicas(self.request.capacity):
            which, least = self._count(same)
            order = np.argsort(least, kind="stable")
            for some in (order[:FIRST], order[FIRST:]):
                close = np.sort(which[some[least[some] < self.bar]])
                for first in range(0, len(close), BLOCK):
                    yield from self._price(same, close[first : first + BLOCK])

    def smallest(self) -> Smallest | None:
        """The layout that needs the least memory; None if everything is refused before."""
        best: Smallest | None = None
        for same in self._replicas(math.inf):
            for sized in self._sized(same, math.inf):
                for group in same.groups:
                    found = peaks(self.request, sized.ranks, group.held, sized.place)
                    found = np.where(group.allowed[sized.place], found, np.inf)
                    row, shard = np.unravel_index(int(found.argmin()), found.shape)
                    if found[row, shard] < (np.inf if best is None else best.bytes):
                        size, zero = int(group.shards[0, shard]), int(group.zero[0, 0])
                        layout = self.where.layout(same.rows, int(sized.which[row]), zero, size)
                        best = Smallest(layout, float(found[row, shard]))
        return best

    def _replicas(self, capacity: float) -> Iterator[Replicas]:
        """Everything that the model and the schedules allow, dp after dp.

        What cannot fit into `capacity` by the state of its ranks alone is refused.
        """
        rows = self._meshes
        if not len(rows):
            return
        more = choices(self.where, rows)
        weights = more.weights(rows)
        self.considered = int(weights.sum())
        found = self.where.refused(rows.table, frozenset(), DEGREES)
        rows = self._sieve(rows, weights, found)
        if not len(rows):
            return
        self._tables = MeshTables(self.where, rows)
        rows = replace(rows, mesh=np.arange(len(rows)))
        for dp in _from_the_middle(np.unique(rows.table.dp).tolist()):
            options = shardings(dp, self.where.limits)
            if options:
                one = np.array([dp])
                some = rows.take(rows.table.dp == dp, dp=one, shards=one)
                yield from self._of_replicas(some, more, options, capacity)

    def _of_replicas(
        self, rows: Rows, more: Choices, options: Sequence[Sharding], capacity: float
    ) -> Iterator[Replicas]:
        """The rows of one dp, if there are any."""
        rows = more.add_schedules(rows)
        weights = more.weights_of_schedules(rows)
        known = DEGREES
        rows = self._sieve(rows, weights, self.where.refused(rows.table, known, SCHEDULES))
        rows, known = more.add_switches(rows), known | SCHEDULES
        ways = np.full(len(rows), sum(option.shards.size for option in options))
        rows = self._sieve(rows, ways, self.where.refused(rows.table, known, SWITCHES))
        if not len(rows):
            return
        few, place = self._few(rows)
        groups = tuple(
            ShardedRows.of(self.request, few, (np.array([[option.zero]]), option.shards), SHARDINGS)
            for option in options
        )
        left = np.flatnonzero(self._possible(groups, place))
        states = zip(*(group.bounds[0].state for group in groups), strict=True)
        least = tuple(reduce(np.minimum, of_kind) for of_kind in states)
        fits = _fit_bare(least, self.request.framework.stack, capacity)[place[left]]
        self.refused[MEMORY] += int(ways[0]) * int((~fits).sum())
        left = left[fits]
        yield Replicas(rows.take(left), place[left], few, groups, least)

    def _sieve(
        self, rows: Rows, weights: Integers, reasons: Iterable[tuple[str, Booleans]]
    ) -> Rows:
        """Drop what is refused, and count all that it stands for."""
        left = np.ones(len(rows), dtype=np.bool_)
        for reason, refused in reasons:
            self.refused[reason] += int(weights[refused & left].sum())
            left &= ~refused
        return rows if left.all() else rows.take(left)

    def _possible(self, groups: Sequence[ShardedRows], place: Integers) -> Booleans:
        """Which rows can be sharded in some way; all ways of the others are refused."""
        some = np.zeros(int(place.max(initial=-1)) + 1, dtype=np.bool_)
        for group in groups:
            some |= group.allowed.any(axis=1)
        gone = place[~some[place]]
        for group in groups:
            for reason, clashes in group.refused.items():
                self.refused[reason] += int(clashes[gone].sum())
        found: Booleans = some[place]
        return found

    def _few(self, rows: Rows) -> tuple[Few, Integers]:
        """What rows have in common, and the place of each row among it."""
        table = rows.table
        first, place = different([table.tp, table.cp, table.ep, table.sp * 1, rows.variant])
        some = rows.take(first)
        return Few.of(self.kinds, some.table.tall, some.variant), place

    def _sized(self, same: Replicas, capacity: float) -> Iterator[Sized]:
        """What rows hold, of those that fit in the least way to shard them, kind after kind."""
        stack = self.request.framework.stack
        for block in same.blocks():
            which = np.arange(block.start, block.stop)
            sized, of_block = Sized(which, same.place[block], ()), self._of_block(same, block)
            for kind, least in enumerate(same.least):
                if len(sized.which):
                    rank = plain_moments(same.few, of_block, sized.place, kind)
                    sized = sized._replace(ranks=(*sized.ranks, rank))
                    fits = rank.peak(WholeUnits(), least, sized.place, stack)[:, 0] <= capacity
                    if not fits.all():
                        sized, of_block = sized.take(fits), of_block.take(fits)
            self.refused[MEMORY] += same.ways * (len(which) - len(sized.which))
            if len(sized.which):
                yield sized

    def _of_block(self, same: Replicas, which: Which) -> BlockMemory:
        """What one block of some rows saves and makes."""
        return self._tables.blocks(same.rows.take(which))

    def _count(self, same: Replicas) -> tuple[Integers, Floats]:
        """Count what fits and what does not.

        Returns:
            The rows that fit in some way and may be below the bar: their places, and seconds that
            no way to shard them goes below.
        """
        places, seconds = [np.empty(0, np.int64)], [np.empty(0)]
        for sized in self._sized(same, self.request.capacity):
            which = sized.which[self._fit(same, sized)]
            pipes = self._pipelines(same, which)
            least = pipes.seconds(pipes.inner)[:, 0]
            places.append(which[least < self.bar])
            seconds.append(least[least < self.bar])
        return np.concatenate(places), np.concatenate(seconds)

    def _fit(self, same: Replicas, sized: Sized) -> Booleans:
        """Which rows fit in some way; all ways are counted."""
        often = np.bincount(sized.place, minlength=len(same.few.variant))
        for group in same.groups:
            for reason, clashes in group.refused.items():
                self.refused[reason] += int(often @ clashes.sum(axis=1))
        fitting = np.zeros(len(sized.which), dtype=np.int64)
        for group in same.groups:
            ways = self._ways(group, sized)
            fitting += ways
            self.refused[MEMORY] += int(often @ group.allowed.sum(axis=1) - ways.sum())
        self.feasible += int(fitting.sum())
        return fitting > 0

    def _ways(self, group: ShardedRows, sized: Sized) -> Integers:
        """In how many ways of a group rows fit: mostly in all or in none, which two prices say."""
        if group.shards.size <= FEW:
            one_by_one: Integers = self._fits(group, sized)[1].sum(axis=1)
            return one_by_one
        least, most = group.bounds
        capacity = self.request.capacity
        every = peaks(self.request, sized.ranks, most, sized.place)[:, 0] <= capacity
        some = peaks(self.request, sized.ranks, least, sized.place)[:, 0] <= capacity
        ways = np.where(every, group.allowed.sum(axis=1)[sized.place], 0)
        rest = np.flatnonzero(some & ~every)
        ways[rest] = self._fits(group, sized.take(rest))[1].sum(axis=1)
        return ways

    def _fits(self, group: ShardedRows, sized: Sized) -> tuple[Floats, Booleans]:
        """Bytes of rows with every way to shard them, and whether they fit and may be so."""
        found = peaks(self.request, sized.ranks, group.held, sized.place)
        return found, (found <= self.request.capacity) & group.allowed[sized.place]

    def _price(self, same: Replicas, which: Integers) -> Iterator[PricedRows]:
        """Rows with every way to shard them, group after group."""
        place, of_block = same.place[which], self._of_block(same, which)
        kinds = range(len(same.few.blocks))
        ranks = (plain_moments(same.few, of_block, place, kind) for kind in kinds)
        sized = Sized(which, place, tuple(ranks))
        pipes = self._pipelines(same, which)
        for group in same.groups:
            found, fits = self._fits(group, sized)
            some = np.flatnonzero(fits.any(axis=1))
            if len(some):
                seconds = pipes.take(some).step_seconds(group)
                yield PricedRows(
                    same.rows.take(which[some]), group, seconds, found[some], fits[some]
                )

    def _pipelines(self, same: Replicas, which: Integers) -> Pipelines:
        """Rows with the seconds of their units looked up."""
        rows, units = same.rows.take(which), self._tables.units
        inner = units.seconds(rows, self.kinds.blocks.together[rows.variant, 0])
        hop, table = units.hops(rows), rows.table.tall
        place = same.place[which]
        return Pipelines(self.request, self.kinds, table, rows.variant, place, inner, hop)


def _fit_bare(least: Sequence[Floats], stack: Stack, capacity: float) -> Booleans:
    """Which of the few fit by the least state of their ranks alone."""
    worst: Floats = reduce(np.maximum, least)[:, 0]
    return stack.context + (1 + stack.fragmentation) * worst <= capacity


def _from_the_middle(values: list[int]) -> list[int]:
    """The middle of ascending values first: a good layout is found soon, and many need no price."""
    places = range(len(values))
    return [values[place] for place in sorted(places, key=lambda i: abs(2 * i - len(values)))]
