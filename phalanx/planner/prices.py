"""Prices of layouts by column: the formulas of an estimate, but for the playing of schedules.

A search and its refinements ask here. Pipelines are priced by the closed formulas of their
schedules; see `ScheduleSpec.makespan`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.operator import UNITS, UnitName
from phalanx.cost.activation_memory import ActivationMemory
from phalanx.cost.block_memory import BlockMemory
from phalanx.cost.compute import Passes
from phalanx.cost.groups import Routes
from phalanx.cost.holdings import Holdings
from phalanx.cost.memory import PlainMoments
from phalanx.cost.messages.frameworks import messages_of
from phalanx.cost.parameter_memory import ParameterMemory, WholeUnits
from phalanx.cost.ranks import ParameterCounts, PipelineRanks
from phalanx.cost.refusals import refused
from phalanx.cost.table import Booleans, Column, Floats, Integers, Table, some_rows
from phalanx.planner.data_axis import (
    Exchange,
    OverlapBudget,
    StepMessages,
    optimizer_seconds,
    with_jitter,
)
from phalanx.planner.kinds import RankKinds, busiest
from phalanx.planner.units import Units, hop_seconds, weights_shown
from phalanx.planner.workload import Workload
from phalanx.schedules.formulas import Peaks, Pipes
from phalanx.schedules.formulas import Seconds as StageSeconds

Seconds = dict[UnitName, Passes]


class Few(NamedTuple):
    """What rows have in common, once for each that differs: the table behind `ShardedRows`.

    Attributes:
        kinds: of the pipeline ranks.
        table: columns of shape (few, 1).
        variant: the pipeline of each among the kinds, of shape (few,).
        blocks: of each kind of rank.
        params: of each unit.
    """

    kinds: RankKinds
    table: Table
    variant: Integers
    blocks: tuple[PipelineRanks, ...]
    params: ParameterCounts

    @classmethod
    def of(cls, kinds: RankKinds, table: Table, variant: Integers) -> "Few":
        """Those of a table, with what their ranks hold.

        Args:
            kinds: of the pipeline ranks.
            table: columns of shape (few, 1).
            variant: the pipeline of each row among the kinds, of shape (few,).
        """
        several = range(kinds.kinds(variant))
        blocks = tuple(kinds.blocks_of(variant, kind).tall for kind in several)
        return cls(kinds, table, variant, blocks, ParameterCounts.of(table, blocks[0].together))

    def take(self, which: Integers) -> "Few":
        """Some of them."""
        return Few(
            self.kinds,
            self.table.take(which),
            self.variant[which],
            tuple(blocks.take(which) for blocks in self.blocks),
            self.params.take(which),
        )

    @property
    def ends(self) -> Holdings:
        """Of their pipelines, what messages ask beside the units of a rank."""
        copies = self.kinds.copies[self.variant][:, None]
        return Holdings({}, copies, self.blocks[0].together > 0)

    @property
    def units(self) -> Column:
        """How many units the stages of the first rank have."""
        first = 1 + self.kinds.first_dense[self.variant] + self.kinds.first_routed[self.variant]
        return (first[:, None] + (self.table.pp == 1)) * self.table.v


class HeldParameters(NamedTuple):
    """Bytes of parameters of ranks, for each kind of rank.

    Attributes:
        state: that stay, of shape (few, shardings).
        whole: units that are whole.
    """

    state: tuple[Floats, ...]
    whole: tuple[WholeUnits, ...]

    def over(self, best: np.ufunc) -> "HeldParameters":
        """The least or the most over all ways to shard, of shape (few, 1).

        Args:
            best: np.minimum or np.maximum.
        """

        def fold(column: Column) -> Column:
            return best.reduce(column, axis=1, keepdims=True) if np.ndim(column) else column

        whole = (WholeUnits(*map(fold, units)) for units in self.whole)
        return HeldParameters(tuple(map(fold, self.state)), tuple(whole))


@dataclass(frozen=True)
class ShardedRows:
    """What depends on degrees, sharding and blocks of a rank alone: a small table of its own.

    Attributes:
        workload: what is trained, and on what.
        few: the layouts.
        zero, shards: the ways to shard.
        held: bytes of parameters.
        kept: parameters that the optimizer of the busiest rank moves.
        refused: what cannot be sharded so, by reason, where there is some.
    """

    workload: Workload
    few: Few
    zero: Integers
    shards: Integers
    held: HeldParameters
    kept: Floats
    refused: dict[str, Booleans]

    @classmethod
    def of(
        cls,
        workload: Workload,
        few: Few,
        sharding: tuple[Integers, Integers],
        new: frozenset[str],
    ) -> "ShardedRows":
        """Bytes of parameters for some ways to shard.

        Args:
            workload: what is trained, and on what.
            few: the layouts.
            sharding: stages that really shard, and the ranks that share a copy.
            new: keys of a layout by which it has not been refused yet.
        """
        zero, shards = sharding
        table = replace(few.table, zero=zero, shards=shards)
        stack, ours = workload.framework.stack, workload.framework.sends_as_ledger
        held = [ParameterMemory(table, blocks, few.params, stack, zero) for blocks in few.blocks]
        kept = [np.where(zero > 0, h.parameters_kept, h.shared + h.experts) for h in held]
        shape = (len(few.variant), shards.shape[1])
        known = frozenset(field.name for field in fields(Layout)) - new
        return cls(
            workload=workload,
            few=few,
            zero=zero,
            shards=shards,
            held=HeldParameters(
                tuple(np.broadcast_to(sum(h.state), shape) for h in held),
                tuple(h.whole_units for h in held),
            ),
            kept=np.broadcast_to(reduce(np.maximum, kept), shape),
            refused={
                reason: np.broadcast_to(clashes, shape)
                for reason, clashes in refused(table, known, new, ours=ours)
                if np.any(clashes)
            },
        )

    @cached_property
    def allowed(self) -> Booleans:
        """What can be sharded so, of shape (few, shardings)."""
        found = np.ones((len(self.few.variant), self.shards.shape[1]), dtype=np.bool_)
        for clashes in self.refused.values():
            found &= ~clashes
        return found

    @cached_property
    def bounds(self) -> tuple[HeldParameters, HeldParameters]:
        """The least and the most that ranks hold, over all ways to shard."""
        return self.held.over(np.minimum), self.held.over(np.maximum)

    def sent(self, place: Integers) -> "ShardingSeconds":
        """What rows send to share the weights; priced once for each of the few that occurs.

        Args:
            place: of every row among the few, of shape (rows,).

        Returns:
            Seconds, of shape (rows, shardings) or what broadcasts to it.
        """
        some, inverse = np.unique(place, return_inverse=True)
        few, alone = self.few.take(some), len(self.few.variant) == 1
        zero, shards = (
            column if alone else some_rows(column, some) for column in (self.zero, self.shards)
        )
        return ShardingSeconds.of(self.workload, few, (zero, shards)).take(inverse)


class ShardingSeconds(NamedTuple):
    """Seconds of the data axis and its like.

    Attributes:
        around: of what ZeRO sends around each unit; none where it sends nothing there.
        exchange: of what is sent once a step.
    """

    around: Seconds
    exchange: Exchange

    @classmethod
    def of(
        cls, workload: Workload, few: Few, sharding: tuple[Integers, Integers]
    ) -> "ShardingSeconds":
        """Those of some layouts, with some ways to shard them.

        Args:
            workload: what is trained, and on what.
            few: the layouts.
            sharding: stages that really shard, and ranks that share a copy; both broadcast to
                (few, shardings).
        """
        zero, shards = sharding
        table, framework = replace(few.table, zero=zero, shards=shards), workload.framework
        messages = messages_of(table, framework, axes=_of_step(workload), held=few.ends)
        routes = Routes(table, framework, workload.fabric)
        units = Units(workload, table, few.params, messages, routes)
        first = few.blocks[0]
        counts: dict[UnitName, Column] = {
            "embedding": first.first,
            "dense block": first.dense,
            "routed block": first.routed,
            "head": first.last,
        }
        around = {unit: units.around(unit) for unit in UNITS if np.any(zero >= 2)}
        return cls(around, StepMessages(messages, counts, routes).exchange(few.units))

    def take(self, which: Integers) -> "ShardingSeconds":
        """Some of the rows."""
        around = {
            unit: Passes(*(some_rows(column, which) for column in passes))
            for unit, passes in self.around.items()
        }
        return ShardingSeconds(around, self.exchange.take(which))


@dataclass(frozen=True)
class Pipelines:
    """Rows whose seconds are asked for.

    Attributes:
        workload: what is trained, and on what.
        kinds: of the pipeline ranks.
        table: the layouts, in columns of shape (rows, 1).
        variant: the pipeline of each among the kinds, of shape (rows,).
        place: of each in the tables of a group.
        inner: one micro-batch through each unit, but for what ZeRO sends around it.
        hop: seconds to carry one tensor to another rank, of shape (rows, 1).
    """

    workload: Workload
    kinds: RankKinds
    table: Table
    variant: Integers
    place: Integers
    inner: Seconds
    hop: Floats

    def take(self, which: Integers) -> "Pipelines":
        """Some of the rows."""
        inner = {unit: Passes(*(c[which] for c in passes)) for unit, passes in self.inner.items()}
        return replace(
            self,
            table=self.table.take(which),
            variant=self.variant[which],
            place=self.place[which],
            inner=inner,
            hop=some_rows(self.hop, which),
        )

    def seconds(self, units: Seconds) -> Floats:
        """From the first forward to the last backward, by the closed formulas.

        Args:
            units: seconds of one micro-batch through each unit, of shape (rows, 1) or
                (rows, shardings).

        Returns:
            Of the common shape.
        """
        table, shape = self.table, self.workload.shape
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
            worst=busiest(self.kinds, self.variant, totals),
            total=every.total,
            hop=self.hop,
        )
        return self.kinds.makespans(pipes, self.variant)

    def step_seconds(self, group: ShardedRows) -> Floats:
        """One optimizer step, of shape (rows, shardings)."""
        workload, place, table = self.workload, self.place, self.table
        sent, units = group.sent(place), dict(self.inner)
        for unit, around in sent.around.items():
            if unit in units:
                units[unit] = units[unit].plus(weights_shown(workload, units[unit], around))
        body = self.seconds(units) + optimizer_seconds(workload, table, group.kept[place])
        body = body + workload.rates.step
        for shown in sent.exchange.shown(workload, self._budget(units)).values():
            body = body + shown
        lasts: Floats = body + with_jitter(workload, table, body)
        return lasts

    def _budget(self, units: Seconds) -> OverlapBudget:
        """One micro-batch on the first rank; only the first of its stages counts, v times."""
        kinds, variant, table = self.kinds, self.variant, self.table
        dense, routed = kinds.first_dense[variant][:, None], kinds.first_routed[variant][:, None]
        alone = (table.pp == 1) * 1
        first = units["dense block"].times(dense).plus(units["embedding"])
        first = first.plus(units["head"].times(alone))
        if "routed block" in units:
            first = first.plus(units["routed block"].times(routed))
        return OverlapBudget(first.times(table.v), (1 + dense + routed + alone) * table.v)


def plain_moments(few: Few, of_block: BlockMemory, place: Integers, kind: int) -> PlainMoments:
    """Bytes of one kind of rank beside its parameters, of shape (rows, 1).

    Args:
        few: parameters and pipelines, of which each row has one.
        of_block: what one block of every row saves and makes.
        place: of every row among the few.
        kind: of rank.
    """
    table, kinds, variant = of_block.table, few.kinds, few.variant[place]
    columns = (np.broadcast_to(c, (len(place), 1))[:, 0] for c in (table.pp, table.m, table.v))
    p, m, v = columns
    sized = any(mode.segment > 1 for mode in table.recompute.values)
    blocks = kinds.blocks_of(variant, kind, sizes=sized).tall
    in_flight = kinds.in_flight(variant, kind, Peaks(p, m, v, p))[:, None]
    held = ActivationMemory(table, blocks, few.params.take(place), in_flight, of_block)
    return PlainMoments.of(held)


def peaks(
    workload: Workload, plain: Sequence[PlainMoments], held: HeldParameters, place: Integers
) -> Floats:
    """Bytes of the worst rank, of shape (rows, shardings).

    Args:
        workload: for what the program loses beside it.
        plain: bytes of every kind of rank beside its parameters.
        held: its parameters, of the few layouts of which each row is one.
        place: of every row among them.
    """
    stack = workload.framework.stack
    ranks = zip(plain, held.whole, held.state, strict=True)
    found: Iterator[Floats] = (
        rank.peak(whole, state, place, stack) for rank, whole, state in ranks
    )
    return reduce(np.maximum, found)


class Prices(NamedTuple):
    """Prices of some layouts.

    Attributes:
        seconds: of a step.
        peaks: bytes of the worst rank.
        allowed: whether the program can run them.
    """

    seconds: Floats
    peaks: Floats
    allowed: Booleans


def price_layouts(workload: Workload, layouts: Sequence[Layout]) -> Prices:
    """Price any layouts, each as a row of one table.

    Args:
        workload: what is trained, and on what.
        layouts: as many devices and sequences as the workload has; their precision is its own.
    """
    order = sorted(range(len(layouts)), key=lambda i: layouts[i].schedule)
    ordered = [layouts[i] for i in order]
    pipelines = [Layout(pp=x.pp, v=x.v, schedule=x.schedule, stages=x.stages) for x in ordered]
    codes = {layout: code for code, layout in enumerate(dict.fromkeys(pipelines))}
    kinds = RankKinds.of(workload.shape, list(codes))
    variant = np.array([codes[layout] for layout in pipelines], dtype=np.int64)
    few = Few.of(kinds, workload.table(ordered).tall, variant)
    sharding = few.table.zero_stage, few.table.shards
    group = ShardedRows.of(workload, few, sharding, frozenset())
    place = np.arange(len(ordered))
    keys = frozenset(field.name for field in fields(Layout))
    ours, clashes = workload.framework.sends_as_ledger, np.zeros((len(ordered), 1), dtype=np.bool_)
    for _, found in refused(few.table, frozenset(), keys, ours=ours):
        clashes = clashes | found
    of_block = BlockMemory(few.table, workload.framework.stack)
    several = range(kinds.kinds(variant))
    plain = [plain_moments(few, of_block, place, kind) for kind in several]
    pipes = _pipelines(workload, few, place)
    back = np.argsort(order)
    return Prices(
        pipes.step_seconds(group)[back, 0],
        peaks(workload, plain, group.held, place)[back, 0],
        ~clashes[back, 0],
    )


def _pipelines(workload: Workload, few: Few, place: Integers) -> Pipelines:
    """Pipelines of a table, with the seconds of its units asked for directly."""
    table, framework = few.table, workload.framework
    messages = messages_of(table, framework, held=few.ends)
    routes = Routes(table, framework, workload.fabric)
    units = Units(workload, table, few.params, messages, routes)
    shape = table.dp.shape
    names = [unit for unit in UNITS if unit != "routed block" or workload.shape.is_moe]
    inner = {
        unit: Passes(*(np.broadcast_to(c, shape) for c in units.seconds(unit).seconds))
        for unit in names
    }
    hop = np.broadcast_to(hop_seconds(messages, routes), shape)
    return Pipelines(workload, few.kinds, table, few.variant, place, inner, hop)


def _of_step(workload: Workload) -> tuple[str, ...]:
    """The axes that send something once a step."""
    if not workload.framework.sends_as_ledger:
        return ("data",)
    return ("data", "tensor", "pipeline", "precision", "expert", "world")
