"""Seconds and bytes of one layout: a table of one row, whose schedule is played."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from phalanx.core.cluster import Cluster
from phalanx.core.estimate import Estimate, PricedMessage, RankBytes, Term
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operator import UNITS, UnitName
from phalanx.cost.activation_memory import ActivationMemory
from phalanx.cost.block_memory import BlockMemory
from phalanx.cost.collectives import bytes_sent
from phalanx.cost.compute import Passes
from phalanx.cost.flops import utilization
from phalanx.cost.framework import PHALANX, Framework
from phalanx.cost.groups import Routes
from phalanx.cost.holdings import Holdings, holdings
from phalanx.cost.memory import worst_moment
from phalanx.cost.messages import times_in_step
from phalanx.cost.messages.frameworks import messages_of
from phalanx.cost.messages.unit import UnitMessage
from phalanx.cost.parameter_memory import ParameterMemory
from phalanx.cost.ranks import ParameterCounts, ranks_of
from phalanx.cost.table import Floats, Integers, Table
from phalanx.planner.data_axis import (
    OverlapBudget,
    StepMessages,
    apart,
    optimizer_seconds,
    with_jitter,
)
from phalanx.planner.pipeline import Pipeline, stage_counts
from phalanx.planner.uncertainty import uncertainty
from phalanx.planner.units import UPDATES, SentMessage, Units, UnitSeconds, hop_seconds
from phalanx.planner.workload import Workload, workload_of
from phalanx.schedules.layouts import chunks, placement, spec_of


def estimate(
    shape: ModelShape,
    cluster: Cluster,
    layout: Layout,
    seq: int,
    batch: int,
    framework: Framework = PHALANX,
) -> Estimate:
    """Price one layout.

    Args:
        shape: the model.
        cluster: as many devices as the layout has ranks.
        layout: how the step is cut.
        seq: s, tokens per sequence.
        batch: sequences per step.
        framework: what program it is.

    Raises:
        UsageError: a sequence or a batch without tokens.
        RefusedError: the model, the batch or the devices cannot be cut so.
    """
    workload, layout = workload_of(shape, cluster, layout, seq, batch, framework)
    return Priced(workload, layout).estimate()


@dataclass(frozen=True)
class Priced:
    """One layout with its prices, each found when it is asked for.

    Attributes:
        workload: what is trained, and on what.
        layout: with its precision resolved.
    """

    workload: Workload
    layout: Layout

    def estimate(self) -> Estimate:
        """All of it."""
        inside, bubble = self.pipeline.report()
        step = Term("step", children=(*inside, *self._outside()))
        step = self._with_jitter(step)
        workload, layout = self.workload, self.layout
        doubt = uncertainty(workload, layout)
        rate = workload.tokens / step.seconds
        peak = workload.machine.peak * layout.ranks
        use = utilization(workload.shape, workload.seq, rate, peak, layout.recompute)
        return Estimate(
            layout=layout,
            tokens=workload.tokens,
            step=step,
            mfu=use.mfu,
            hfu=use.hfu,
            convention=use.convention,
            bubble=bubble,
            micro_batches=self.m,
            ranks=tuple(self.rank_bytes()),
            capacity=workload.capacity,
            messages=tuple(map(_with_bytes_sent, self._messages())),
            spread=doubt.spread,
            spread_reason=doubt.reason,
            notes=tuple(self._notes()),
        )

    def step_seconds(self) -> float:
        """Only the seconds, in less time: nothing is itemised, and no bytes are counted."""
        body = Term("step", children=(Term("inside", self.pipeline.seconds()), *self._outside()))
        return self._with_jitter(body).seconds

    def block_seconds(self) -> float:
        """Forward and backward of one block alone, for all micro-batches of a step."""
        unit: UnitName = "routed block" if self.workload.shape.is_moe else "dense block"
        return float(np.max(self.units[unit].seconds.total)) * self.m

    @property
    def m(self) -> int:
        """Micro-batches per rank and step."""
        return self.layout.micro_batches(self.workload.batch)

    @cached_property
    def table(self) -> Table:
        """The layout as a table of one row."""
        return self.workload.table([self.layout])

    @cached_property
    def sends(self) -> list[UnitMessage]:
        """What every unit sends."""
        return messages_of(self.table, self.workload.framework)

    @cached_property
    def routes(self) -> Routes:
        """What messages cross."""
        return Routes(self.table, self.workload.framework, self.workload.fabric)

    @cached_property
    def counts(self) -> dict[UnitName, Integers]:
        """Units of every stage of one copy of the model."""
        return stage_counts(self.workload.shape, self.layout)

    @cached_property
    def activations(self) -> ActivationMemory:
        """What the pipeline ranks hold beside parameters."""
        layout = self.layout
        blocks = ranks_of(self.workload.shape, layout)
        params = ParameterCounts.of(self.table, blocks.together[:1])
        held = spec_of(layout).peak_in_flight(layout.pp, self.m, chunks(layout))
        of_block = BlockMemory(self.table, self.workload.framework.stack)
        return ActivationMemory(self.table, blocks, params, np.array(held, np.float64), of_block)

    @cached_property
    def parameters(self) -> ParameterMemory:
        """And their parameters."""
        held = self.activations
        zero = self.table.zero_stage
        stashed = held.in_flight - 1 if self.is_asynchronous else 0
        return ParameterMemory(self.table, held.blocks, held.params, held.stack, zero, stashed)

    @cached_property
    def units(self) -> dict[UnitName, UnitSeconds]:
        """One micro-batch through every kind of unit that there is."""
        params = self.activations.params
        units = Units(self.workload, self.table, params, self.sends, self.routes)
        found = {}
        for unit in UNITS:
            if np.any(self.counts[unit]):
                found[unit] = units.with_weights(unit, units.seconds(unit))
        return found

    @cached_property
    def pipeline(self) -> Pipeline:
        """The stages, ready to be played."""
        found = Pipeline.of(self.layout, self.m, self.units, self.counts, self.hop)
        if not self.is_asynchronous:
            return found
        update = np.stack([np.zeros(self.layout.pp)] * 2 + [self._updates()])
        return replace(found, terms={**found.terms, UPDATES: update})

    @property
    def is_asynchronous(self) -> bool:
        """Whether every micro-batch moves the weights (PipeDream)."""
        return spec_of(self.layout).asynchronous

    def _updates(self) -> Floats:
        """Seconds in which each rank moves the weights of its one stage; nothing hides them."""
        moved = optimizer_seconds(self.workload, self.table, self._kept())
        sent = []
        for rank in range(self.layout.pp):
            exchange = StepMessages(self.sends, self._counts_of(rank), self.routes).exchange(1)
            sent.append(float(np.max(exchange.reduce + exchange.gather)))
        found: Floats = np.broadcast_to(moved, (self.layout.pp,)) + np.array(sent)
        return found

    def rank_bytes(self) -> Iterator[RankBytes]:
        """Bytes of every pipeline rank at its worst moment."""
        memory = worst_moment(self.activations, self.parameters)
        shape = self.activations.blocks.dense.shape
        classes = {n: np.broadcast_to(size, shape) for n, size in memory.by_class().items()}
        for rank, moment in enumerate(np.broadcast_to(memory.moment, shape)):
            by_class = tuple((name, float(size[rank])) for name, size in classes.items())
            yield RankBytes(rank, str(moment), by_class, float(self.activations.in_flight[rank]))

    @cached_property
    def step_messages(self) -> StepMessages:
        """What the rank that finishes last, which is the first one, sends once a step."""
        return StepMessages(self.sends, self._counts_of(0), self.routes)

    @cached_property
    def shown(self) -> dict[str, float]:
        """Seconds that the data axis adds to the pipeline."""
        first = sum(int(count[0]) for count in self.counts.values())
        v = chunks(self.layout)
        units = max(first * v, 1)
        budget = OverlapBudget(Passes(*(self.pipeline.total[:, 0] * v)), units)
        exchange = self.step_messages.exchange(units)
        if self.is_asynchronous:  # gradients and weights travel with every micro-batch
            exchange = exchange._replace(reduce=0.0, gather=0.0)
        shown = exchange.shown(self.workload, budget)
        return {name: float(np.max(seconds)) for name, seconds in shown.items()}

    def _counts_of(self, rank: int) -> dict[UnitName, int]:
        slices = list(placement(self.layout).slices_of(rank))
        return {unit: int(count[slices].sum()) for unit, count in self.counts.items()}

    def _outside(self) -> Iterator[Term]:
        """The data axis and the optimizer."""
        parts = tuple(Term(n, s, worth=s) for n, s in self.shown.items() if s)
        if parts:
            yield Term("data axis", children=parts, worth=sum(part.seconds for part in parts))
        if self.is_asynchronous:
            return
        kept = float(np.max(self._kept()))
        time = float(np.max(optimizer_seconds(self.workload, self.table, kept)))
        each = self.workload.framework.optimizer_bytes
        reason = f"{each:g} bytes for each of {kept:.3g} parameters"
        yield Term("optimizer", time, worth=time, reason=reason)
        if around := self.workload.rates.step:
            yield Term("around the step", around, worth=0.0, reason="batches and meters, measured")

    def _kept(self) -> Floats:
        """Parameters whose state every rank keeps."""
        held = self.parameters
        whole = held.shared + held.experts
        kept: Floats = np.where(self.table.zero_stage > 0, held.parameters_kept, whole)
        return kept

    def _with_jitter(self, body: Term) -> Term:
        """Add what replicas wait for the slowest."""
        workload = self.workload
        wait = float(with_jitter(workload, self.table, np.array([body.seconds]))[0])
        if not wait:
            return body
        domains, share = int(apart(workload, self.table)[0]), workload.rates.jitter
        reason = f"{share:.2%} of a step for every doubling of {domains} replicas in other domains"
        jitter = Term("waiting for the slowest rank", wait, worth=wait, reason=reason)
        return replace(body, children=(*body.children, jitter))

    @cached_property
    def hop(self) -> float:
        """Seconds to carry one tensor to the next stage."""
        return float(np.max(hop_seconds(self.sends, self.routes)))

    def _messages(self) -> Iterator[PricedMessage]:
        """What the busiest rank sends in a step, equal messages added up."""
        rank = self.pipeline.busiest
        held = holdings(self.table, rank)
        sent = [each for unit in self.units.values() for each in unit.sent]
        at_end = StepMessages(self.sends, self._counts_of(rank), self.routes)
        sent += at_end.sent(self.shown)
        sent += self._hops()
        yield from _added_up(sent, held, self.table.m)

    def _hops(self) -> Iterator[SentMessage]:
        """What stages send each other; what shows of it is a term of its own."""
        ranks, hop = self.routes.group("pp neighbours").size, np.array([self.hop])
        for message in self.sends:
            if message.among == "pp neighbours":
                yield SentMessage(message, ranks, hop, 0 * hop)

    def _notes(self) -> Iterator[str]:
        rates, device = self.workload.rates, self.workload.cluster.accelerator
        if not rates.rows:
            yield f"no published run on {device.name} was used: {rates.source}"
        if not device.peaks:
            yield f"the peak of {device.name} is not published; assumed"


def _with_bytes_sent(message: PricedMessage) -> PricedMessage:
    """A message with what one rank sends for it."""
    if message.collective == "send":
        return message._replace(bytes_per_rank=message.bytes)
    sent = bytes_sent(message.collective, message.bytes, message.ranks)
    return message._replace(bytes_per_rank=float(sent))


def _added_up(found: Iterable[SentMessage], held: Holdings, m: Integers) -> Iterator[PricedMessage]:
    """Equal messages of a step as one, with their seconds."""
    totals: dict[tuple[str, str, str, float, int], Floats] = {}
    joined: dict[tuple[str, str, str, int], Floats] = {}
    for message, ranks, seconds, exposed in found:
        each = message.axis, message.collective, message.purpose
        times = float(np.max(times_in_step(message, held, m)))
        if not times:
            continue
        size, n = float(np.max(message.bytes)), int(np.max(ranks))
        costs = float(np.max(seconds)), float(np.max(exposed))
        if message.together:
            sums = joined.setdefault((*each, n), np.zeros(3))
            sums += (size * times, *costs)
        else:
            sums = totals.setdefault((*each, size, n), np.zeros(3))
            sums += (times, times * costs[0], times * costs[1])
    for (axis, collective, purpose, size, n), (times, lasts, shown) in totals.items():
        sent = sent_by_one_rank(collective, size, n)
        yield PricedMessage(axis, collective, purpose, size, times, lasts, shown, n, sent)
    for (axis, collective, purpose, n), (size, lasts, shown) in joined.items():
        sent = sent_by_one_rank(collective, size, n)
        yield PricedMessage(axis, collective, purpose, size, 1, lasts, shown, n, sent)


def sent_by_one_rank(collective: str, size: float, ranks: int) -> float:
    """Bytes that one rank sends for one message.

    Args:
        collective: one of `collectives.NAMES`, or "send".
        size: bytes of the full vector; of the message for a send.
        ranks: of the group.

    Raises:
        UsageError: an unknown collective, or a group without ranks.
    """
    return size if collective == "send" else float(bytes_sent(collective, size, ranks))
