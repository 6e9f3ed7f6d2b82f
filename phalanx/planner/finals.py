"""Decides among the fastest layouts: the best of every mesh is priced by `estimate` itself.

The closed formulas are off by little where the stages of a pipeline are even. Where they are not,
they are off by much the same for all layouts with that schedule, so what one exact price shows
corrects the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.estimate import Estimate
from phalanx.core.layout import Layout
from phalanx.planner.candidates import Space
from phalanx.planner.columns import Floats, Rows, Sharding, different
from phalanx.planner.estimate import answer, step_seconds
from phalanx.planner.question import Question, ask
from phalanx.planner.sweep import Request
from phalanx.schedules.layouts import chunks

CLOSE = 1.5  # a layout this much slower than the best so far is no contender
MOST_PRICED = 60  # exact prices at the most, in one search
MARGIN = 1.015  # a closed formula may be so much too high, and its layout still the best
EQUAL = 1e-6  # prices in 32 bits that differ by less are the same


class Prices(NamedTuple):
    """Layouts that fit, by the closed formulas.

    Attributes:
        seconds: of a step.
        variants: place of its schedule in `Space.variants`.
    """

    seconds: NDArray[np.float32]
    variants: NDArray[np.int16]


class Mesh(NamedTuple):
    """How the devices are cut, apart from what each of them does."""

    dp: int
    pp: int
    tp: int
    cp: int
    ep: int


@dataclass(frozen=True)
class Ranked:
    """One layout of the answer.

    Attributes:
        rank: its place among all layouts that fit, from 1.
        estimate: its price.
    """

    rank: int
    estimate: Estimate

    @property
    def mesh(self) -> Mesh:
        """How it cuts the devices."""
        return mesh_of(self.estimate.layout)


class Contender(NamedTuple):
    """A layout with its price by the closed formulas."""

    seconds: float
    variant: int
    layout: Layout


class Contenders:
    """The fastest layout of every mesh and schedule, as blocks of layouts come by."""

    def __init__(self, where: Space) -> None:
        self._where = where
        self._best: dict[tuple[int, ...], Contender] = {}
        self._least = float("inf")

    def add(self, rows: Rows, sharding: Sharding, seconds: Floats) -> None:
        """Look at a block of rows.

        Args:
            rows: those of one dp.
            sharding: their ZeRO stage.
            seconds: of shape (rows, shards), infinite where a layout does not fit.
        """
        shard = seconds.argmin(axis=1)
        best = seconds[np.arange(len(rows)), shard]
        self._least = min(self._least, float(best.min()))
        close = np.flatnonzero(best < self.bar)
        if not len(close):
            return
        some = rows.take(close)
        columns = (some.pp, some.tp, some.cp, some.ep, some.variant)
        for row in close[different(columns, least=best[close]).first].tolist():
            key = (rows.dp, rows.pp, rows.tp, rows.cp, rows.ep, rows.variant)
            known = self._best.get(at := tuple(int(column[row]) for column in key))
            if known is None or best[row] < known.seconds:
                size = int(sharding.shards[0, shard[row]])
                layout = self._where.layout(rows, row, sharding.zero, size)
                self._best[at] = Contender(float(best[row]), at[-1], layout)

    @property
    def bar(self) -> float:
        """Seconds above which a layout is no contender."""
        return CLOSE * self._least

    def fastest(self) -> list[Contender]:
        """Those that are still close to the best, fastest first."""
        close = [c for c in self._best.values() if c.seconds < self.bar]
        return sorted(close, key=_order)


def _order(contender: Contender) -> tuple[float, int]:
    """By seconds; of equal ones the one that cuts along fewer axes comes first."""
    layout = contender.layout
    cuts = sum(
        degree > 1 for degree in (layout.pp, layout.tp, layout.cp, layout.ep, chunks(layout))
    )
    return float(f"{contender.seconds:.6g}"), cuts


class Decision(NamedTuple):
    """The best of each of the best meshes, fastest first, and the corrected prices of all."""

    ranked: tuple[Ranked, ...]
    seconds: NDArray[np.float32]


def decide(request: Request, contenders: Sequence[Contender], prices: Prices) -> Decision:
    """Price the best layout of the best meshes exactly, and rank it among all layouts.

    Args:
        request: the question.
        contenders: fastest first.
        prices: of all that fit.
    """
    final = _Final(request, contenders, int(prices.variants.max(initial=0)) + 1)
    while (next_one := final.next_one()) is not None:
        final.price(next_one)
    corrected = np.sort(prices.seconds * final.ratios[prices.variants].astype(np.float32))
    ranked: list[Ranked] = []
    for best in sorted(final.best.values(), key=_order)[: request.top]:
        before = ranked[-1].rank if ranked else 0
        rank = max(rank_among(corrected, best.seconds), before + 1) if ranked else 1
        ranked.append(Ranked(rank, answer(_ask(request, best.layout))))
    return Decision(tuple(ranked), corrected)


def _ask(request: Request, layout: Layout) -> Question:
    shape, cluster, practice = request.shape, request.cluster, request.practice
    return ask(shape, cluster, layout, request.seq, request.batch, practice)


def rank_among(seconds: NDArray[np.float32], step_seconds: float) -> int:
    """The place, from 1, of a layout of so many seconds among ascending prices."""
    return int(np.searchsorted(seconds, np.float32(step_seconds * (1 - EQUAL)))) + 1


class _Final:
    """Exact prices so far, and what they teach about each schedule."""

    def __init__(self, request: Request, contenders: Sequence[Contender], variants: int) -> None:
        self.request = request
        self.contenders = contenders
        self.meshes = [mesh_of(contender.layout) for contender in contenders]
        self.seconds = np.array([contender.seconds for contender in contenders])
        self.variants = np.array([c.variant for c in contenders], dtype=np.int64)
        self.open = np.ones(len(contenders), dtype=np.bool_)
        self.ratios = np.ones(variants)
        self.best: dict[Mesh, Contender] = {}

    def next_one(self) -> int | None:
        """The contender that may yet change the answer, if there is one."""
        while self.open.any() and np.count_nonzero(~self.open) < MOST_PRICED:
            expected = np.where(self.open, self.seconds * self.ratios[self.variants], np.inf)
            place = int(expected.argmin())
            known = self.best.get(self.meshes[place])
            if known is None or expected[place] < MARGIN * known.seconds:
                return place if expected[place] < MARGIN * self._bar() else None
            self.seconds[place] = np.inf
            self.open[place] = False
        return None

    def _bar(self) -> float:
        """Seconds of the last mesh that is wanted; infinite until there are as many."""
        known = sorted(best.seconds for best in self.best.values())
        top = self.request.top
        return known[top - 1] if len(known) >= top else float("inf")

    def price(self, place: int) -> None:
        """Price one contender exactly."""
        contender = self.contenders[place]
        seconds = step_seconds(_ask(self.request, contender.layout))
        self.open[place] = False
        self.ratios[contender.variant] = seconds / contender.seconds
        known = self.best.get(self.meshes[place])
        if known is None or seconds < known.seconds:
            self.best[self.meshes[place]] = contender._replace(seconds=seconds)


def mesh_of(layout: Layout) -> Mesh:
    """The mesh of a layout."""
    return Mesh(layout.dp, layout.pp, layout.tp, layout.cp, layout.ep)
