"""Seconds of one micro-batch through each kind of unit: kernels, messages, and what hides them.

Everything is a column over a table of layouts. A unit is an embedding, a block without or with
experts, or a head.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from phalanx.core.operator import UnitName
from phalanx.core.operators import describe
from phalanx.cost.block_memory import BlockMemory
from phalanx.cost.blocks import Slice, block_work, embedding_work, head_work
from phalanx.cost.compute import Again, MemoryBoundKernel, Passes, Product, Scores, price
from phalanx.cost.groups import Routes
from phalanx.cost.messages.unit import UnitMessage
from phalanx.cost.ranks import ParameterCounts
from phalanx.cost.roofline import expected_ranks
from phalanx.cost.table import Column, Table
from phalanx.planner.workload import Workload

# What the time inside the pipeline goes to; the kernels, then the messages by axis.
PRODUCTS, ATTENTION, MEMORY = "products", "attention", "memory"
ACCUMULATION, RECOMPUTE, LAUNCH = "accumulation", "recompute", "launch"
WEIGHTS, OFFLOAD, UPDATES = "weights", "offload", "updates"
INSIDE_AXES = ("tensor", "context", "expert")
KINDS: dict[str, type] = {PRODUCTS: Product, ATTENTION: Scores, MEMORY: MemoryBoundKernel}


class SentMessage(NamedTuple):
    """A kind of message with its price.

    Attributes:
        message: what is sent.
        ranks: of the group.
        seconds: of one.
        exposed: seconds of one that nothing hides.
    """

    message: UnitMessage
    ranks: Column
    seconds: Column
    exposed: Column


class Load(NamedTuple):
    """What a unit asks of a device, before it waits for kernels to be launched.

    Attributes:
        terms: seconds of the three passes by what they go to.
        peak: see `UnitSeconds`.
        launches: number of kernels and messages, in forward and in backward.
        sent: its messages.
    """

    terms: dict[str, Passes]
    peak: dict[str, Passes]
    launches: Passes
    sent: tuple[SentMessage, ...] = ()


@dataclass(frozen=True)
class UnitSeconds:
    """One micro-batch through one unit.

    Attributes:
        terms: seconds of the three passes by what they go to; they add up.
        peak: seconds of products and of attention at the peak, parts of their terms.
        sent: its messages.
    """

    terms: dict[str, Passes]
    peak: dict[str, Passes]
    sent: tuple[SentMessage, ...]

    @property
    def seconds(self) -> Passes:
        """All of it."""
        return added_up(self.terms.values())


def added_up(passes: Iterable[Passes]) -> Passes:
    """All of them, one after the other."""
    total = Passes()
    for each in passes:
        total = total.plus(each)
    return total


@dataclass(frozen=True)
class Units:
    """Prices the units of a table.

    Attributes:
        workload: what is trained, and on what.
        table: the layouts.
        params: of each unit.
        messages: of all units.
        routes: what they cross.
    """

    workload: Workload
    table: Table
    params: ParameterCounts
    messages: Sequence[UnitMessage]
    routes: Routes

    def seconds(self, unit: UnitName) -> UnitSeconds:
        """One micro-batch through a unit, but for what ZeRO gathers and reduces around it.

        Args:
            unit: of a routed block there must be experts.
        """
        load = self.load(unit)
        terms = {**load.terms, LAUNCH: starved(self.workload, load)}
        if unit in _BLOCKS and np.any(self._away):
            terms[OFFLOAD] = self._copies(unit, added_up(terms.values()))
        return UnitSeconds(terms, load.peak, load.sent)

    def load(self, unit: UnitName, *, axes: Container[str] = INSIDE_AXES) -> "Load":
        """Kernels of a unit, and its messages along some axes.

        Args:
            unit: which.
            axes: whose messages count.
        """
        return self.with_messages(unit, self._kernels(unit), axes)

    def with_messages(self, unit: UnitName, load: "Load", axes: Container[str]) -> "Load":
        """Add messages to the kernels of a unit, in whose place they are launched.

        Messages of a step, and those that hide behind the next unit or a whole pass, are left out.

        Args:
            unit: which.
            load: its kernels; products and attention among its terms, if messages hide behind them.
            axes: whose messages count.
        """
        sent, launches, terms = list(load.sent), load.launches, dict(load.terms)
        for message in self.messages:
            waits = message.behind not in ("next unit", "pass") and message.when != "step"
            if message.unit != unit or message.axis not in axes or not waits:
                continue
            priced, times = self._price(message, load.terms), self.times(message)
            of_pass = Passes(F=times) if message.when == "forward" else Passes(I=times)
            terms[message.axis] = terms.get(message.axis, Passes()).plus(
                of_pass.times(priced.exposed)
            )
            launches = launches.plus(of_pass)
            sent.append(priced)
        return Load(terms, load.peak, launches, tuple(sent))

    def with_weights(self, unit: UnitName, inner: UnitSeconds) -> UnitSeconds:
        """Add what ZeRO-2 and 3 gather and reduce around a unit; see `weights_shown`.

        Args:
            unit: which.
            inner: its seconds without that; they come back as they are where nothing is sent.
        """
        found = [m for m in self.messages if m.unit == unit and m.behind == "next unit"]
        if not found:
            return inner
        around, busy = self.around(unit), inner.seconds
        shown = weights_shown(self.workload, busy, around)
        shares = [
            np.where(total > 0, part / np.where(total > 0, total, 1.0), 0.0)
            for part, total in ((shown.F, around.F), (shown.I, around.I))
        ]
        sent = []
        for message in found:
            ranks, seconds = self._alone(message)
            share = shares[message.when != "forward"]
            sent.append(SentMessage(message, ranks, seconds, seconds * share))
        return replace(inner, terms={**inner.terms, WEIGHTS: shown}, sent=(*inner.sent, *sent))

    def around(self, unit: UnitName) -> Passes:
        """Seconds of what ZeRO-2 and 3 gather and reduce around one unit, in a micro-batch.

        Returns:
            Under F what is gathered in forward, under I what goes on in backward.
        """
        total = Passes()
        for message in self.messages:
            if message.unit == unit and message.behind == "next unit":
                lasts = self._alone(message)[1] * self.times(message)
                forward = message.when == "forward"
                total = total.plus(Passes(F=lasts) if forward else Passes(I=lasts))
        return total

    def times(self, message: UnitMessage) -> Column:
        """How often a unit sends it in a micro-batch, on average over the blocks of a segment."""
        if message.share == "all":
            return message.times
        length = self.table.recompute.pick(lambda mode: max(mode.segment, 1))
        without = {"not last": 1, "not last two": 2}[message.share]
        return message.times * np.maximum(length - without, 0) / length

    def _kernels(self, unit: UnitName) -> "Load":
        workload, table = self.workload, self.table
        cut = Slice(table, workload.framework)
        match unit:
            case "embedding":
                works, params = embedding_work(cut), self.params.embedding
            case "head":
                works, params = head_work(cut), self.params.head
            case "dense block":
                works, params = block_work(cut, routed=False), self.params.dense
            case "routed block":
                works = block_work(cut, routed=True)
                params = self.params.routed + self.params.experts
        kernels = price(works, workload.machine)
        repeated = Again()
        if unit in _BLOCKS:
            early = workload.framework.stops_early
            repeated = kernels.repeated(table.recompute, stops_early=early)
        alone = 0.0 if workload.framework.fused_accumulation else workload.framework.accumulate
        terms = {name: kernels.sum(kind) for name, kind in KINDS.items()}
        if not workload.framework.learns:
            terms[PRODUCTS], alone = terms[PRODUCTS]._replace(W=0.0), 0.0
        terms[ACCUMULATION] = Passes(W=workload.machine.memory_seconds(alone * params))
        terms[RECOMPUTE] = Passes(I=repeated.seconds)
        forward, backward = kernels.launches.sum(axis=1)
        peak = {name: kernels.at_peak(KINDS[name]) for name in (PRODUCTS, ATTENTION)}
        return Load(terms, peak, Passes(forward, backward + repeated.kernels))

    def _price(self, message: UnitMessage, terms: dict[str, Passes]) -> SentMessage:
        """A message beside the kernels of its unit."""
        ranks, lasts = self._alone(message)
        shown = lasts
        if message.behind == "product" and self.workload.framework.hides_sums:
            beside = terms[PRODUCTS].times(1 / (2 * self._products(message.unit)))
            behind = beside.I if message.when == "weight gradient" else beside.W
            shown = exposed(self.workload, lasts, behind)
        elif message.axis == "expert" and self.workload.framework.hides_experts:
            # of a forward and a backward that go on at once, a fourth for each of four messages
            busy = terms[PRODUCTS].total + terms[ATTENTION].total
            shown = exposed(self.workload, lasts, busy / 4)
        elif message.behind == "attention":
            attention = terms[ATTENTION]
            behind = attention.I / 2 if message.when == "input gradient" else attention.F
            shown = np.maximum(lasts - behind / self.table.cp, 0.0)
        return SentMessage(message, ranks, lasts, shown)

    def _alone(self, message: UnitMessage) -> tuple[Column, Column]:
        """Ranks of the group of a message, and seconds of one."""
        group = self.routes.group(message.among)
        if message.among == "ep" and self.workload.framework.sends_token_once:
            return group.size, tokens_once(self.routes, message)
        return group.size, self.routes.seconds(message.collective, message.among, message.bytes)

    def _products(self, unit: str) -> int:
        """How many products of a unit have messages around them."""
        operators = describe(self.table.model).of(unit)  # type: ignore[arg-type]  # of a unit
        found = [op.boundary for op in operators if op.boundary]
        return max(sum(each.kind != "gather" or bool(each.again) for each in found), 1)

    @property
    def _away(self) -> Column:
        return self.table.offload.test(lambda offload: offload.activations)

    def _copies(self, unit: UnitName, busy: Passes) -> Passes:
        """Activations that leave for the host in forward and come back in backward, beside both.

        The next block computes while those of one are on their way (Rajbhandari et al. 2021,
        arXiv:2104.07857, section 5.2.2); only what takes longer than that is waited for.
        """
        dense, routed = BlockMemory(self.table, self.workload.framework.stack).saved
        host = self.workload.fabric.host
        size = np.where(self._away, routed if unit == "routed block" else dense, 0.0)
        lasts = np.where(size > 0, host.latency + size / host.bandwidth, 0.0)
        return Passes(np.maximum(lasts - busy.F, 0.0), np.maximum(lasts - busy.backward, 0.0))


_BLOCKS = ("dense block", "routed block")


def starved(workload: Workload, load: Load) -> Passes:
    """Seconds that the device waits for its next kernel, in forward and in all of backward.

    Args:
        workload: of it the seconds between two launches, which graphs of kernels do without; on a
            device without a queue nothing hides them.
        load: what is launched, and how long it keeps the device busy.

    Returns:
        Those of backward stand under I.
    """
    launch = 0.0 if workload.framework.graphs else workload.rates.launch
    busy = added_up(load.terms.values()) if workload.rates.queued else Passes()
    forward = np.maximum(launch * load.launches.F - busy.F, 0.0)
    return Passes(forward, np.maximum(launch * load.launches.backward - busy.backward, 0.0))


def weights_shown(workload: Workload, busy: Passes, around: Passes) -> Passes:
    """Exposed seconds of what ZeRO gathers and reduces around a unit, one unit ahead of the work.

    What the arithmetic of one unit cannot hide of the next one's messages is exposed.

    Args:
        workload: for what arithmetic loses to messages.
        busy: seconds of the unit.
        around: seconds of its messages in forward and in backward.
    """
    return Passes(exposed(workload, around.F, busy.F), exposed(workload, around.I, busy.backward))


def hop_seconds(messages: Iterable[UnitMessage], routes: Routes) -> Column:
    """Seconds to carry one tensor to the next pipeline rank; 0 where there is none.

    Args:
        messages: of any axes; the first between pipeline neighbours counts.
        routes: what it crosses.
    """
    sends = [message for message in messages if message.among == "pp neighbours"]
    if not sends:
        return np.zeros(1)
    seconds = routes.seconds("send", "pp neighbours", sends[0].bytes)
    return np.where(sends[0].times > 0, seconds, 0.0)


def tokens_once(routes: Routes, message: UnitMessage) -> Column:
    """Seconds of an all-to-all in which a token visits every rank and every other domain once.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2.

    Args:
        routes: of it the group of the message, the links, and K.
        message: its bytes are those of K copies of each token.
    """
    K, fabric, group = routes.table.model.top_k, routes.fabric, routes.group(message.among)
    e, r = group.size, group.inside(fabric)
    tokens, near = message.bytes / K, group.near(fabric)
    inside = tokens * expected_ranks(e, K) * (r - 1) / e / near.bandwidth
    beyond = tokens * expected_ranks(e // r, K) * (1 - r / e) / fabric.far.bandwidth
    latency = np.where(r < e, fabric.far.latency, near.latency)
    return np.where(e > 1, np.maximum(inside, beyond) + latency, 0.0)


def exposed(workload: Workload, message: Column, behind: Column) -> Column:
    """Seconds of messages that show behind so much arithmetic.

    What is longer than the arithmetic, and of the rest what the arithmetic loses to it.

    Args:
        workload: of it the share that is lost, `Sustained.interference`.
        message: seconds of the messages, a column.
        behind: seconds of the arithmetic, a column.
    """
    return message - np.minimum(message, behind) * (1 - workload.rates.interference)
