"""What a step adds to its pipeline: gathers and reductions that nothing hides, and the update.

All columns. The rank that finishes its backward last is the first one, so its parameters count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from phalanx.cost.block_memory import BF16 as HALF
from phalanx.cost.compute import Passes
from phalanx.cost.groups import Routes
from phalanx.cost.messages.unit import Among, UnitMessage
from phalanx.cost.operator import UnitName
from phalanx.cost.parameter_memory import state_bytes
from phalanx.cost.table import Column, Table
from phalanx.planner.units import SentMessage, exposed_share
from phalanx.planner.workload import Workload

REDUCE, GATHER, OVER_COPIES = "reduction of gradients", "gather of weights", "reduction over copies"
FIRST_GATHER, LAST_REDUCTION, SMALL = "first gather", "last reduction", "small sums"


@dataclass(frozen=True)
class OverlapBudget:
    """Arithmetic that messages may hide behind: one micro-batch on the first rank.

    Attributes:
        passes: seconds of all its stages.
        units: how many units they have; the messages of one unit always show.
    """

    passes: Passes
    units: Column


class _Total(NamedTuple):
    """Messages of one kind and group, all units of a rank together."""

    bytes: Column
    seconds: Column


@dataclass(frozen=True)
class DataAxis:
    """The ends of a step on the first rank.

    Attributes:
        workload: what is trained, and on what.
        table: the layouts.
        messages: of all units.
        counts: how many of each unit the first rank holds.
        budget: what may hide messages.
        routes: what they cross.
    """

    workload: Workload
    table: Table
    messages: Sequence[UnitMessage]
    counts: dict[UnitName, Column]
    budget: OverlapBudget
    routes: Routes

    @cached_property
    def terms(self) -> dict[str, Column]:
        """Seconds of a step by what they go to; what no row has is left out."""
        framework, passes = self.workload.framework, self.budget.passes
        found = {
            REDUCE: self._once("gradients", passes.backward, hides=framework.hides_gradients),
            GATHER: self._once("weights", passes.F, hides=framework.hides_weights),
            FIRST_GATHER: self._of_one_unit("weights", "forward"),
            LAST_REDUCTION: self._of_one_unit("gradients", "weight gradient"),
            OVER_COPIES: self._over_copies(),
            SMALL: self._small_sums(),
        }
        return {name: seconds for name, seconds in found.items() if np.any(seconds)}

    def sent(self) -> list[SentMessage]:
        """The messages of the end of a step with their prices; what is hidden, evenly over them."""
        terms = self.terms
        shown = {
            "gradients": terms.get(REDUCE, 0.0),
            "weights": terms.get(GATHER, 0.0),
            "gradients of copies": terms.get(OVER_COPIES, 0.0),
        }
        found = []
        for message in self.messages:
            if message.when != "step" or not np.any(self._count(message)):
                continue
            ranks, each = self._alone(message, self._bytes(message))
            exposed = each
            if message.behind == "pass":
                whole = self._seconds(message.purpose, "step")
                exposed = each * (shown[message.purpose] / whole if np.any(whole) else 0.0)
            found.append(SentMessage(message, ranks, each, exposed))
        return found

    def update(self) -> Column:
        """Seconds in which one update's messages show where nothing hides them (PipeDream)."""
        return self._seconds("gradients", "step") + self._seconds("weights", "step")

    def _once(self, purpose: str, behind: Column, *, hides: bool) -> Column:
        """Exposed seconds of what is sent once a step, beside so much arithmetic."""
        return self._shown(self._seconds(purpose, "step"), behind, hides=hides)

    def _over_copies(self) -> Column:
        """HSDP: each rank's part, summed with the other sharded copies.

        It hides behind what the reduction inside a copy leaves of the backward.
        """
        totals = self._totals("gradients of copies", "step")
        if not totals:
            return 0.0
        lasts = self._seconds("gradients of copies", "step")
        inside: Column = 0.0
        for when in ("step", "weight gradient"):
            for among, total in self._totals("gradients", when).items():
                inside = inside + self.routes.seconds("reduce_scatter", among, total.bytes)
        left = np.maximum(self.budget.passes.backward - inside, 0.0)
        return self._shown(lasts, left, hides=self.workload.framework.hides_gradients)

    def _of_one_unit(self, purpose: str, when: str) -> Column:
        """ZeRO-2 and 3: the stages carry most messages; those of one unit show at an end."""
        total: Column = 0.0
        for among, found in self._totals(purpose, when).items():
            collective = "all_gather" if purpose == "weights" else "reduce_scatter"
            size = found.bytes / self.budget.units
            total = total + self.routes.seconds(collective, among, size)
        return total

    def _small_sums(self) -> Column:
        """What is summed once a step beside gradients and weights."""
        total: Column = 0.0
        for message in self.messages:
            if message.when == "step" and message.behind != "pass":
                count = self._count(message)
                each = self._alone(message, self._bytes(message))[1]
                often = 1 if message.together else count
                total = total + each * message.times * often
        return total

    def _shown(self, lasts: Column, behind: Column, *, hides: bool) -> Column:
        if not hides:
            return lasts
        units = self.budget.units
        behind = behind * (1 - 1 / units)
        share = exposed_share(self.workload, lasts, behind)
        return np.maximum(lasts * share, lasts / units)

    def _seconds(self, purpose: str, when: str) -> Column:
        """Of all messages of one purpose, one after the other."""
        return sum(total.seconds for total in self._totals(purpose, when).values())

    def _totals(self, purpose: str, when: str) -> dict[Among, _Total]:
        """Messages of one purpose by group; what goes together is one message."""
        found: dict[Among, _Total] = {}
        for message in self.messages:
            if (message.axis, message.purpose, message.when) != ("data", purpose, when):
                continue
            count = self._count(message) * np.minimum(message.times, 1)
            size = message.bytes * count
            lasts = 0.0 if message.together else count * self._alone(message, message.bytes)[1]
            before = found.get(message.among, _Total(0.0, 0.0))
            size = before.bytes + size
            if message.together:
                lasts = self._alone(message, size)[1]
            else:
                lasts = before.seconds + lasts
            found[message.among] = _Total(size, lasts)
        return found

    def _bytes(self, message: UnitMessage) -> Column:
        return message.bytes * self._count(message) if message.together else message.bytes

    def _count(self, message: UnitMessage) -> Column:
        return self.counts.get(message.unit, 1)  # type: ignore[call-overload]  # a rank is one

    def _alone(self, message: UnitMessage, size: Column) -> tuple[Column, Column]:
        group = self.routes.group(message.among)
        return group.size, self.routes.seconds(message.collective, message.among, size)


def optimizer_seconds(workload: Workload, table: Table, kept: Column) -> Column:
    """AdamW over the parameters whose state a rank keeps, at the rate of memory.

    State that has left the device is updated on its host, which reads and writes it at the rate of
    the link to the device: an assumption, since the catalog knows no memory of hosts. Over the link
    itself go a reduced gradient and a new weight.
    """
    each = workload.framework.optimizer_bytes
    seconds = workload.machine.memory_seconds(kept * each)
    away = table.offload.test(lambda offload: offload.state)
    if np.any(table.optimistic):  # copies of master weights and moments, read and written
        copied = sum(state_bytes(table.precision, table.zero_stage, workload.framework.stack)[2:])
        undo = workload.machine.memory_seconds(2 * copied * kept)
        seconds = seconds + np.where(table.optimistic, undo, 0.0)
    if np.any(away):
        link = (each + HALF + workload.framework.gradient) * kept / workload.fabric.host.bandwidth
        seconds = np.where(away, link, seconds)
    return seconds


def with_jitter(workload: Workload, table: Table, body: Column) -> Column:
    """Seconds that replicas wait for the slowest: a share of a step for every doubling of them.

    Only the data axis makes all ranks wait at once; replicas in one domain differ little.
    """
    return body * workload.rates.jitter * np.log2(apart(workload, table))


def apart(workload: Workload, table: Table) -> Column:
    """Replicas in different domains."""
    return np.minimum(workload.cluster.domains(workload.cluster.count), table.dp * table.cp)
