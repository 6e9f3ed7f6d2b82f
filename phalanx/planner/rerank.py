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
from phalanx.cost.table import Floats
from phalanx.planner.columns import different
from phalanx.planner.estimate import Priced
from phalanx.planner.prices import ShardedRows
from phalanx.planner.space import Rows, Space
from phalanx.planner.sweep import Request
from phalanx.schedules.layouts import chunks, spec_of

CLOSE = 1.5  # a layout this much slower than the best so far is no candidate
MOST_PRICED = 60  # exact prices at the most, in one search
MARGIN = 1.015  # a closed formula may be so much too high, and its layout still the best
LIKE = 0.01  # share of a step by which layouts may differ that do the same with other names
PLAIN = 3  # schedules with a whole backward that are priced exactly, to say what splitting it buys
EQUAL = 1e-6  # prices in 32 bits that differ by less are the same


class FeasiblePrices(NamedTuple):
    """Layouts that fit, by the closed formulas.

    Attributes:
        seconds: of a step.
        variants: place of its schedule in `Space.variants`.
    """

    seconds: NDArray[np.float32]
    variants: NDArray[np.int16]


class MeshDegrees(NamedTuple):
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
        alike: the best of other meshes that do the same with other names: ranks moved between dp
            and cp, with micro-batches that make up for it.
    """

    rank: int
    estimate: Estimate
    alike: tuple[Layout, ...] = ()

    @property
    def mesh(self) -> MeshDegrees:
        """How it cuts the devices."""
        return mesh_of(self.estimate.layout)


class _Place(NamedTuple):
    """A layout as it stands in a table, with its price: few become values."""

    seconds: float
    rows: Rows
    row: int
    zero: int
    size: int


class Candidate(NamedTuple):
    """A layout that may be among the best.

    Attributes:
        seconds: of a step, by the closed formulas until it is priced exactly.
        variant: place of its schedule in `Space.variants`.
        layout: all its keys.
    """

    seconds: float
    variant: int
    layout: Layout


class Candidates:
    """The fastest layout of every mesh and schedule, as blocks of layouts come by."""

    def __init__(self, where: Space) -> None:
        self._where = where
        self._best: dict[tuple[int, ...], _Place] = {}
        self._least = float("inf")

    def add(self, rows: Rows, group: ShardedRows, seconds: Floats) -> None:
        """Look at a block of rows.

        Args:
            rows: those of one dp.
            group: the ways in which they are sharded.
            seconds: of shape (rows, shards), infinite where a layout does not fit.
        """
        shard = seconds.argmin(axis=1)
        best = seconds[np.arange(len(rows)), shard]
        self._least = min(self._least, float(best.min()))
        close = np.flatnonzero(best < self.bar)
        if not len(close):
            return
        table = rows.table
        columns = (table.pp, table.tp, table.cp, table.ep, rows.variant)
        keys = [np.broadcast_to(column, len(rows)) for column in columns]
        chosen = different([key[close] for key in keys], least=best[close]).first
        for row in close[chosen].tolist():
            at = (int(table.dp[0]), *(int(key[row]) for key in keys))
            known = self._best.get(at)
            if known is None or best[row] < known.seconds:
                zero, size = int(group.zero[0, 0]), int(group.shards[0, shard[row]])
                self._best[at] = _Place(float(best[row]), rows, row, zero, size)

    @property
    def bar(self) -> float:
        """Seconds above which a layout is no candidate."""
        return CLOSE * self._least

    def fastest(self) -> list[Candidate]:
        """Those that are still close to the best, fastest first."""
        close = [
            Candidate(it.seconds, at[-1], self._where.layout(it.rows, it.row, it.zero, it.size))
            for at, it in self._best.items()
            if it.seconds < self.bar
        ]
        return sorted(close, key=by_seconds)


def by_seconds(candidate: Candidate) -> tuple[float, int]:
    """For sorting: by seconds; of equal ones the one that cuts along fewer axes comes first."""
    layout = candidate.layout
    cuts = sum(
        degree > 1 for degree in (layout.pp, layout.tp, layout.cp, layout.ep, chunks(layout))
    )
    return float(f"{candidate.seconds:.6g}"), cuts


class Decision(NamedTuple):
    """The best of each of the best meshes, fastest first, and the corrected prices of all.

    Attributes:
        ranked: like ones stand under the simplest.
        plain: the best whose schedule does not split the backward, where that of the first does.
        seconds: corrected, ascending.
    """

    ranked: tuple[Ranked, ...]
    plain: Ranked | None
    seconds: NDArray[np.float32]


def decide(request: Request, candidates: Sequence[Candidate], prices: FeasiblePrices) -> Decision:
    """Price the best layout of the best meshes exactly, and rank it among all layouts.

    Args:
        request: the question.
        candidates: fastest first.
        prices: of all that fit.
    """
    final = _Final(request, candidates, int(prices.variants.max(initial=0)) + 1)
    while (next_one := final.next_one()) is not None:
        final.price(next_one)
    corrected = np.sort(prices.seconds * final.ratios[prices.variants].astype(np.float32))
    ranked: list[Ranked] = []
    for first, *others in final.groups()[: request.top]:
        before = ranked[-1].rank if ranked else 0
        rank = max(rank_among(corrected, first.seconds), before + 1) if ranked else 1
        alike = tuple(other.layout for other in others)
        ranked.append(Ranked(rank, final.priced[first.layout].estimate(), alike))
    return Decision(tuple(ranked), _plain(final, ranked, corrected), corrected)


def _plain(
    final: "_Final", ranked: Sequence[Ranked], seconds: NDArray[np.float32]
) -> Ranked | None:
    """The best schedule that leaves the backward whole, where the first of all does not."""
    if not ranked or not spec_of(ranked[0].estimate.layout).splits_backward:
        return None
    whole = [c for c in final.candidates if not spec_of(c.layout).splits_backward][:PLAIN]
    if not whole:
        return None
    found = [Priced(final.request, candidate.layout) for candidate in whole]
    best = min(found, key=lambda priced: priced.step_seconds()).estimate()
    return Ranked(rank_among(seconds, best.step_seconds), best)


def rank_among(seconds: NDArray[np.float32], step_seconds: float) -> int:
    """The place, from 1, of a layout among all that fit.

    Args:
        seconds: prices of all, ascending.
        step_seconds: of the layout; prices that differ by rounding to 32 bits are no better.
    """
    return int(np.searchsorted(seconds, np.float32(step_seconds * (1 - EQUAL)))) + 1


class _Final:
    """Exact prices so far, and what they teach about each schedule."""

    def __init__(self, request: Request, candidates: Sequence[Candidate], variants: int) -> None:
        self.request = request
        self.candidates = candidates
        self.meshes = [mesh_of(candidate.layout) for candidate in candidates]
        self.seconds = np.array([candidate.seconds for candidate in candidates])
        self.variants = np.array([c.variant for c in candidates], dtype=np.int64)
        self.open = np.ones(len(candidates), dtype=np.bool_)
        self.ratios = np.ones(variants)
        self.best: dict[MeshDegrees, Candidate] = {}
        self.priced: dict[Layout, Priced] = {}

    def next_one(self) -> int | None:
        """The candidate that may yet change the answer, if there is one."""
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
        known = [group[0].seconds for group in self.groups()]
        top = self.request.top
        return known[top - 1] if len(known) >= top else float("inf")

    def groups(self) -> list[list[Candidate]]:
        """The best of each mesh, fastest first; like ones together, the simplest in front."""
        groups: dict[tuple[object, ...], list[Candidate]] = {}
        for best in sorted(self.best.values(), key=by_seconds):
            layout = best.layout
            same = (layout.pp, layout.tp, layout.ep, layout.schedule, chunks(layout))
            groups.setdefault((*same, layout.dp * layout.cp), []).append(best)
        found = []
        for members in groups.values():
            near = [c for c in members if c.seconds <= members[0].seconds * (1 + LIKE)]
            found.append(sorted(near, key=lambda c: (c.layout.cp, c.layout.mb)))
            found += [[c] for c in members if c not in near]
        return sorted(found, key=lambda group: by_seconds(group[0]))

    def price(self, place: int) -> None:
        """Price one candidate exactly."""
        candidate = self.candidates[place]
        priced = self.priced.setdefault(candidate.layout, Priced(self.request, candidate.layout))
        seconds = priced.step_seconds()
        self.open[place] = False
        self.ratios[candidate.variant] = seconds / candidate.seconds
        known = self.best.get(self.meshes[place])
        if known is None or seconds < known.seconds:
            self.best[self.meshes[place]] = candidate._replace(seconds=seconds)


def mesh_of(layout: Layout) -> MeshDegrees:
    """The mesh of a layout."""
    return MeshDegrees(layout.dp, layout.pp, layout.tp, layout.cp, layout.ep)
