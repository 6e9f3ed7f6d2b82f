"""Stragglers: a rank whose own work takes longer than that of its peers, and what of it does.

What counts is time that leaves waiting for other ranks out, so that the one who waits is never
blamed. Ranks at the same place of the pipeline have the same work and are compared with each other;
one without peers is compared with what it took itself at the start.
"""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx.core.layout import Layout
from phalanx.trainer.parallel.mesh import Mesh

EVERY = 5  # steps between two comparisons
CONFIRMED = 3  # in a row before a rank is named: 20 steps after it became slow, at the latest
LEAST_SHARE = 0.075  # of a step that a rank must take longer
LEAST_SECONDS = 2e-3
CAUSES = ("compute", "data", "link")


class OwnTime(NamedTuple):
    """Seconds of one step of one rank, or of some steps in the middle.

    Attributes:
        compute: in which it did neither wait nor any of the following.
        data: that it waited for its batch.
        link: that it took to hand its messages over.
        step: from its beginning to its end.
    """

    compute: float
    data: float
    link: float
    step: float


class Straggler(NamedTuple):
    """A rank that holds the others up.

    Attributes:
        rank: which.
        cause: compute, data or link.
        seconds: of a step that this takes longer than expected.
        share: of a step.
    """

    rank: int
    cause: str
    seconds: float
    share: float

    def __str__(self) -> str:
        what = {
            "compute": "its own work takes",
            "data": "waiting for its batch takes",
            "link": "handing its messages over takes",
        }[self.cause]
        return (
            f"rank {self.rank} is slow ({self.cause}): {what} {self.seconds * 1e3:.3g} ms of a "
            f"step longer than expected, {self.share:.0%} of it"
        )


class StragglerJudge:
    """Compares tables of own times, one after the other; the same tables give the same verdicts.

    Attributes:
        named: those that hold the others up now.
    """

    def __init__(self, layout: Layout) -> None:
        places = [layout.coordinates(rank).pp for rank in range(layout.ranks)]
        self._peers = [
            [other for other, at in enumerate(places) if at == place and other != rank]
            for rank, place in enumerate(places)
        ]
        self._first: list[list[OwnTime]] = [[] for _ in places]
        self._in_a_row: dict[tuple[int, str], int] = {}
        self.named: dict[tuple[int, str], Straggler] = {}

    def judge(self, table: Sequence[OwnTime]) -> list[Straggler]:
        """Look at the times of all ranks.

        Args:
            table: of each rank, over the same steps.

        Returns:
            Those that are named for the first time, or again after they had kept up.
        """
        step = statistics.median(row.step for row in table)
        slow = {}
        for rank, row in enumerate(table):
            for cause in CAUSES:
                more = _seconds(row, cause) - self._expected(table, rank, cause)
                if more > max(LEAST_SHARE * step, LEAST_SECONDS):
                    slow[rank, cause] = Straggler(rank, cause, more, more / step)
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in slow}
        for rank, row in enumerate(table):
            if len(self._first[rank]) < CONFIRMED:
                self._first[rank].append(row)
        found = {key: one for key, one in slow.items() if self._in_a_row[key] >= CONFIRMED}
        new = [one for key, one in found.items() if key not in self.named]
        self.named = found
        return new

    def _expected(self, table: Sequence[OwnTime], rank: int, cause: str) -> float:
        peers = self._peers[rank]
        if peers:
            return statistics.median(_seconds(table[other], cause) for other in peers)
        first = self._first[rank]
        if len(first) < CONFIRMED:
            return float("inf")
        return statistics.median(_seconds(row, cause) for row in first)


def _seconds(row: OwnTime, cause: str) -> float:
    return row[CAUSES.index(cause)]


class StragglerWatch:
    """Measures the own time of this rank, and compares it with that of the others."""

    def __init__(self, mesh: Mesh, *, off: bool = False) -> None:
        """Begin.

        Args:
            mesh: all ranks.
            off: times of this host say nothing of its ranks: more of them than cores, say.
        """
        self.judge = StragglerJudge(mesh.layout)
        self._mesh = mesh
        self._off = off or mesh.world.size == 1
        self._steps: list[OwnTime] = []
        self._began = self._waited = self._issued = 0.0

    def begin(self) -> None:
        """A step begins."""
        ledger = self._mesh.ledger
        self._began = time.perf_counter()
        self._waited, self._issued = sum(ledger.waited.values()), ledger.issuing

    def end(self, data: float) -> list[Straggler]:
        """A step is over, but for what ranks tell each other about it; every rank calls it.

        Args:
            data: seconds of it that this rank waited for a batch.

        Returns:
            Who has turned out to be slow; the same on every rank.
        """
        if self._off:
            return []
        ledger = self._mesh.ledger
        step = time.perf_counter() - self._began
        link = ledger.issuing - self._issued
        waited = sum(ledger.waited.values()) - self._waited
        self._steps.append(OwnTime(max(step - waited - link - data, 0.0), data, link, step))
        if len(self._steps) < EVERY:
            return []
        mine = torch.tensor(typical(self._steps), dtype=torch.float64, device=self._mesh.device)
        self._steps.clear()
        everyone = mine.new_empty(self._mesh.world.size * len(mine))
        self._mesh.world.all_gather(everyone, mine, "own times").wait()
        rows = everyone.view(-1, len(mine)).tolist()
        return self.judge.judge([OwnTime(*row) for row in rows])


def typical(steps: Sequence[OwnTime]) -> OwnTime:
    """The mean of some steps, for each cause without the longest: a hiccup does not count."""
    columns = zip(*steps, strict=True)
    return OwnTime(*(statistics.fmean(sorted(column)[:-1] or column) for column in columns))
