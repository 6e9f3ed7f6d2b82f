"""What a step adds to its pipeline: gathers and reductions that nothing hides, and the update.

All columns. The rank that finishes its backward last is the first one, so its parameters count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.core.operator import UnitName
from phalanx.cost.block_memory import BF16 as HALF
from phalanx.cost.compute import Passes
from phalanx.cost.groups import Routes
from phalanx.cost.messages.unit import Among, UnitMessage
from phalanx.cost.parameter_memory import state_bytes
from phalanx.cost.table import Column, Integers, Table, some_rows
from phalanx.planner.units import SentMessage, exposed
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


class Exchange(NamedTuple):
    """How long the data axis and its like take in a step, before anything hides them.

    Attributes:
        reduce, gather: of gradients and of weights, once a step.
        copies: the sum of each rank's part over the sharded copies of HSDP.
        inside: the reduction inside a copy, which goes before that.
        first_gather, last_reduction: of one unit, where units are gathered and reduced around
            their use.
        small: what else is summed once a step.
    """

    reduce: Column
    gather: Column
    copies: Column
    inside: Column
    first_gather: Column
    last_reduction: Column
    small: Column

    def take(self, which: Integers) -> "Exchange":
        """Some of the rows."""
        return Exchange(*(some_rows(part, which) for part in self))

    def shown(self, workload: Workload, budget: OverlapBudget) -> dict[str, Column]:
        """Seconds of a step by what they go to, as far as no arithmetic hides them.

        Gradients hide behind the backward of the last micro-batch and weights behind the forward of
        the first, if the program lets them. The sum over copies hides behind what the reduction
        inside a copy leaves of the backward.

        Args:
            workload: of it what the program hides, and what arithmetic loses to messages.
            budget: the arithmetic of one micro-batch on the first rank; one of its units hides
                nothing.
        """
        gradients, weights = workload.framework.hides_gradients, workload.framework.hides_weights
        backward = budget.passes.backward
        left = np.maximum(backward - self.inside, 0.0)

        def shown(lasts: Column, behind: Column, hides: bool) -> Column:
            if not hides or not np.any(lasts):
                return lasts
            part = 1 / budget.units
            return np.maximum(exposed(workload, lasts, behind * (1 - part)), lasts * part)

        return {
            REDUCE: shown(self.reduce, backward, gradients),
            GATHER: shown(self.gather, budget.passes.F, weights),
            FIRST_GATHER: self.first_gather,
            LAST_REDUCTION: self.last_reduction,
            OVER_COPIES: shown(self.copies, left, gradients),
            SMALL: self.small,
        }


class _Total(NamedTuple):
    """Messages of one kind and group, all units of a rank together."""

    bytes: Column
    seconds: Column


@dataclass(frozen=True)
class StepMessages:
    """What the first rank sends once a step.

    Attributes:
        messages: of all units.
        counts: how many of each unit the rank holds.
        routes: what they cross.
    """

    messages: Sequence[UnitMessage]
    counts: Mapping[UnitName, Column]
    routes: Routes

    def exchange(self, units: Column) -> Exchange:
        """How long they take.

        Args:
            units: of all stages of the rank.
        """
        around: list[Column] = []
        for purpose, when in (("weights", "forward"), ("gradients", "weight gradient")):
            collective = "all_gather" if purpose == "weights" else "reduce_scatter"
            found = self._totals(purpose, when).items()
            each = [self.routes.seconds(collective, a, total.bytes / units) for a, total in found]
            around.append(sum(each))
        return Exchange(
            reduce=self._seconds("gradients"),
            gather=self._seconds("weights"),
            copies=self._seconds("gradients of copies"),
            inside=self._inside(),
            first_gather=around[0],
            last_reduction=around[1],
            small=self._small_sums(),
        )

    def sent(self, shown: Mapping[str, Column]) -> list[SentMessage]:
        """The messages with their prices; what is hidden, evenly over those of one purpose.

        Args:
            shown: seconds of a step that nothing hides, as `Exchange.shown` gives them.
        """
        terms = {"gradients": REDUCE, "weights": GATHER, "gradients of copies": OVER_COPIES}
        found = []
        for message in self.messages:
            if message.when != "step" or not np.any(self._count(message)):
                continue
            ranks, each = self._alone(message, self._bytes(message))
            exposed_each = each
            if message.behind == "pass":
                whole = self._seconds(message.purpose)
                part = shown[terms[message.purpose]] / whole if np.any(whole) else 0.0
                exposed_each = each * part
            found.append(SentMessage(message, ranks, each, exposed_each))
        return found

    def _inside(self) -> Column:
        """Seconds of the reduction of all gradients of a rank inside a sharded copy."""
        if not self._totals("gradients of copies", "step"):
            return 0.0
        total: Column = 0.0
        for when in ("step", "weight gradient"):
            for among, found in self._totals("gradients", when).items():
                total = total + self.routes.seconds("reduce_scatter", among, found.bytes)
        return total

    def _small_sums(self) -> Column:
        total: Column = 0.0
        for message in self.messages:
            if message.when == "step" and message.behind != "pass":
                often = 1 if message.together else self._count(message)
                each = self._alone(message, self._bytes(message))[1]
                total = total + each * message.times * often
        return total

    def _seconds(self, purpose: str) -> Column:
        """Of all messages of one purpose, one after the other."""
        return sum(total.seconds for total in self._totals(purpose, "step").values())

    def _totals(self, purpose: str, when: str) -> dict[Among, _Total]:
        """Messages of one purpose by group; what goes together is one message."""
        found: dict[Among, _Total] = {}
        for message in self.messages:
            if (message.axis, message.purpose, message.when) != ("data", purpose, when):
                continue
            count = self._count(message) * np.minimum(message.times, 1)
            before = found.get(message.among, _Total(0.0, 0.0))
            size = before.bytes + message.bytes * count
            if message.together:
                lasts = self._in_buckets(message, size)
            else:
                lasts = before.seconds + count * self._alone(message, message.bytes)[1]
            found[message.among] = _Total(size, lasts)
        return found

    def _in_buckets(self, message: UnitMessage, size: Column) -> Column:
        """Seconds of one message, or of as many as the program makes of gradients."""
        bucket = self.routes.framework.bucket
        if not bucket or message.purpose != "gradients":
            return self._alone(message, size)[1]
        number = np.maximum(np.ceil(size / bucket), 1)
        return number * self._alone(message, size / number)[1]

    def _bytes(self, message: UnitMessage) -> Column:
        return message.bytes * self._count(message) if message.together else message.bytes

    def _count(self, message: UnitMessage) -> Column:
        counts: dict[str, Column] = dict(self.counts.items())
        return counts.get(message.unit, 1)

    def _alone(self, message: UnitMessage, size: Column) -> tuple[Column, Column]:
        group = self.routes.group(message.among)
        return group.size, self.routes.seconds(message.collective, message.among, size)


def optimizer_seconds(workload: Workload, table: Table, kept: Column) -> Column:
    """Seconds of AdamW over the parameters whose state a rank keeps, at the rate of memory.

    State that has left the device is updated on its host, which reads and writes it at the rate of
    the link to the device: an assumption, since the catalog knows no memory of hosts. Over the link
    itself go a reduced gradient and a new weight.

    Args:
        workload: of it the program, the device and the link to its host.
        table: of it offload, and optimistic, which copies state before it moves.
        kept: parameters of a rank, a column.
    """
    each, machine = workload.framework.optimizer_bytes, workload.machine
    seconds = kept * each / (machine.hbm * (workload.rates.update or workload.rates.memory))
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

    Args:
        workload: of it the share, and how many domains there are.
        table: of it dp and cp.
        body: seconds of a step without this, a column.
    """
    return body * workload.rates.jitter * np.log2(apart(workload, table))


def apart(workload: Workload, table: Table) -> Column:
    """How many replicas are in different domains: the domains, or dp x cp if that is less.

    Args:
        workload: of it the cluster.
        table: of it dp and cp.
    """
    return np.minimum(workload.cluster.domains(workload.cluster.count), table.dp * table.cp)
