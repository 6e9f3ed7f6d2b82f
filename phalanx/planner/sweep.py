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
from phalanx.cost.memory import PlainMoments
from phalanx.cost.parameter_memory import WholeUnits
from phalanx.cost.saved import Stack
from phalanx.cost.table import Booleans, Floats, Integers
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
from phalanx.planner.unit_tables import BlockTables, UnitTables
from phalanx.planner.workload import Workload

BLOCK = 1 << 17  # layouts at once: their columns stay in the cache


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
    """Some rows with one ZeRO stage, and their prices; tables are of shape (rows, shardings)."""

    rows: Rows
    group: ShardedRows
    seconds: Floats
    peaks: Floats
    fits: Booleans


class Smallest(NamedTuple):
    """The layout that needs the least memory, and how much."""

    layout: Layout
    bytes: float


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

    def priced(self) -> Iterator[PricedRows]:
        """Price what fits."""
        units = None
        for few, groups in self._sized(self.request.capacity):
            if not len(few.rows):
                continue
            if units is None:
                units = UnitTables.of(self.where, self._meshes)
            pipes = self._pipelines(few, units)
            least = pipes.seconds(pipes.inner)[:, 0]
            for group in groups:
                yield from self._block(few, pipes, group, least)

    def smallest(self) -> Smallest | None:
        """The layout that needs the least memory; None if everything is refused before."""
        best: Smallest | None = None
        for sized, groups in self._sized(math.inf):
            for group in groups:
                allowed = group.allowed(sized.group)
                found = np.where(
                    allowed, peaks(self.request, sized.ranks, group, sized.group), np.inf
                )
                row, shard = np.unravel_index(int(found.argmin()), found.shape)
                if found[row, shard] < (np.inf if best is None else best.bytes):
                    size = int(group.shards[0, shard])
                    layout = self.where.layout(sized.rows, int(row), int(group.zero[0, 0]), size)
                    best = Smallest(layout, float(found[row, shard]))
        return best

    def _sized(self, capacity: float) -> Iterator[tuple[Sized, list[ShardedRows]]]:
        """Everything that the model and the schedules allow, with the ways to shard it.

        What no way to shard would make fit into `capacity` is refused, with all of them.
        """
        rows = self._meshes
        if not len(rows):
            return
        more = choices(self.where, rows)
        weights = more.weights(rows)
        self.considered = int(weights.sum())
        found = self.where.refused(rows.table, frozenset(), DEGREES)
        rows = self._sieve(rows, weights, found)
        self._meshes = rows = replace(rows, mesh=np.arange(len(rows)))
        if not len(rows):
            return
        self._blocks = BlockTables.of(self.where, rows)
        for dp in _from_the_middle(np.unique(rows.table.dp).tolist()):
            options = shardings(dp, self.where.limits)
            if options:
                some = rows.take(rows.table.dp == dp)
                yield from self._of_replicas(some, more, options, capacity)

    def _of_replicas(
        self, rows: Rows, more: Choices, options: Sequence[Sharding], capacity: float
    ) -> Iterator[tuple[Sized, list[ShardedRows]]]:
        """The rows of one dp, in blocks."""
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
        groups = [
            ShardedRows.of(self.request, few, (np.array([[option.zero]]), option.shards), SHARDINGS)
            for option in options
        ]
        possible = np.flatnonzero(self._possible(groups, place))
        least = [
            reduce(np.minimum, (group.state[kind].min(axis=1) for group in groups))
            for kind in range(len(few.blocks))
        ]
        bare = few_fit(least, self.request.framework.stack, capacity)[place[possible]]
        self.refused[MEMORY] += int(ways[0]) * int((~bare).sum())
        rows, place = rows.take(possible[bare]), place[possible[bare]]
        step = max(BLOCK // max(option.shards.size for option in options), 1)
        for first in range(0, len(rows), step):
            which = np.arange(first, min(first + step, len(rows)))
            sized = self._size(rows.take(which), place[which], few, (least, capacity))
            self.refused[MEMORY] += int(ways[0]) * (len(which) - len(sized.rows))
            yield sized, groups

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
            some |= group.allowed(np.arange(len(some))).any(axis=1)
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

    def _size(
        self, rows: Rows, place: Integers, few: Few, bounds: tuple[Sequence[Floats], float]
    ) -> Sized:
        """What rows hold, of those that fit with the least state: kind after kind of rank."""
        (least, capacity), stack = bounds, self.request.framework.stack
        sized = Sized(rows, place, ())
        for kind in range(self.kinds.kinds(rows.variant)):
            if not len(sized.rows):
                break
            rank = plain_moments(few, self._blocks.blocks(sized.rows), sized.group, kind)
            sized = sized._replace(ranks=(*sized.ranks, rank))
            peak = rank.peak(WholeUnits(), least[kind][sized.group][:, None], stack)
            fits = np.flatnonzero(peak[:, 0] <= capacity)
            if len(fits) < len(peak):
                sized = sized.take(fits)
        return sized

    def _pipelines(self, sized: Sized, units: UnitTables) -> Pipelines:
        """The rows, with the seconds of their units looked up."""
        rows = sized.rows
        inner = units.seconds(rows, self.kinds.blocks.together[rows.variant, 0])
        hop = units.hops(rows)
        table = rows.table.tall
        return Pipelines(self.request, self.kinds, table, rows.variant, sized.group, inner, hop)

    def _block(
        self, sized: Sized, pipes: Pipelines, group: ShardedRows, least: Floats
    ) -> Iterator[PricedRows]:
        found, allowed = (
            peaks(self.request, sized.ranks, group, sized.group),
            group.allowed(sized.group),
        )
        for reason, clashes in group.refused.items():
            self.refused[reason] += int(clashes[sized.group].sum())
        fits = (found <= self.request.capacity) & allowed
        self.feasible += int(fits.sum())
        self.refused[MEMORY] += int(allowed.sum() - fits.sum())
        rows = np.flatnonzero(fits.any(axis=1) & (least < self.bar))
        if len(rows):
            few = pipes if len(rows) == len(fits) else pipes.take(rows)
            seconds = few.step_seconds(group)
            some = sized.rows.take(rows)
            yield PricedRows(some, group, seconds, found[rows], fits[rows])


def few_fit(least: Sequence[Floats], stack: Stack, capacity: float) -> Booleans:
    """Which rows fit by the state of their ranks alone.

    Args:
        least: bytes of state that no way to shard goes below, for each kind of rank.
        stack: what the program loses beside it.
        capacity: of a device.
    """
    worst: Floats = reduce(np.maximum, least)
    return stack.context + (1 + stack.fragmentation) * worst <= capacity


def _from_the_middle(values: list[int]) -> list[int]:
    """The middle of ascending values first: a good layout is found soon, and many need no price."""
    places = range(len(values))
    return [values[place] for place in sorted(places, key=lambda i: abs(2 * i - len(values)))]
