"""Finds the best layout: looks at all that divide, counts what is refused, prices the rest.

Bytes and seconds of all layouts are computed by column (`planner/sweep.py`); more keys are varied
on the fastest (`planner/refine.py`); the fastest of every mesh are then priced one by one by
`estimate`, which decides about their order (`planner/rerank.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.core.estimate import Estimate
from phalanx.planner.refine import refine
from phalanx.planner.rerank import (
    Candidate,
    Candidates,
    FeasiblePrices,
    Ranked,
    by_seconds,
    decide,
    rank_among,
)
from phalanx.planner.sweep import Request, Sweep

FRONT = 40  # of each kind, the fastest layouts on which the second stage varies more keys
NEARLY = 1.25  # of the memory, that a layout may need before its second stage
SLOWER = 1.1  # than the best: a layout that does not fit is no faster once it does


@dataclass(frozen=True)
class Found:
    """The answer.

    Attributes:
        request: the question.
        considered: layouts that divide the devices and the batch.
        feasible: how many of them fit.
        refused: how many of them were refused, by reason.
        seconds: of those that are no slower than `bar`, ascending, by the closed formulas.
        bar: seconds.
        ranked: the best layout of each mesh, fastest first; empty where none fits.
        plain: the best whose schedule does not split the backward, if the first is none.
    """

    request: Request
    considered: int
    feasible: int
    refused: Mapping[str, int]
    seconds: NDArray[np.float32]
    bar: float
    ranked: tuple[Ranked, ...]
    plain: Ranked | None = None

    def rank(self, price: Estimate) -> int:
        """The place that a layout with this price has among all that fit.

        A slow one takes as long as the search itself did: those before it were not priced yet.
        """
        shown = {ranked.estimate.layout: ranked.rank for ranked in self.ranked}
        if price.layout in shown:
            return shown[price.layout]
        if price.step_seconds <= self.bar:
            return rank_among(self.seconds, price.step_seconds)
        return _count_faster(self.request, price.step_seconds) + 1


def search(request: Request) -> Found:
    """Look at every layout; what is priced, refused and ranked is in the answer.

    Raises:
        RefusedError: a limit leaves nothing that divides, or the devices lack the number format.
        UsageError: the program keeps attention scores in memory, which a search cannot price.
    """
    sweep = Sweep(request)
    candidates, missing = Candidates(sweep.where), Candidates(sweep.where)
    seconds, variants = [np.empty(0, np.float32)], [np.empty(0, np.int16)]
    for block in sweep.priced():
        candidates.add(block.rows, block.group, np.where(block.fits, block.seconds, np.inf))
        near = ~block.fits & (block.peaks <= NEARLY * request.capacity)
        missing.add(block.rows, block.group, np.where(near, block.seconds, np.inf))
        sweep.bar = candidates.bar
        near = block.fits & (block.seconds <= sweep.bar)
        seconds.append(block.seconds[near].astype(np.float32))
        column = block.rows.variant.astype(np.int16)[:, None]
        variants.append(np.broadcast_to(column, near.shape)[near])
    prices = FeasiblePrices(np.concatenate(seconds), np.concatenate(variants))
    fastest = candidates.fastest()
    better = _refined(request, fastest, missing.fastest())
    decision = decide(request, sorted([*fastest, *better], key=by_seconds), prices)
    return Found(
        request=request,
        considered=sweep.considered,
        feasible=sweep.feasible,
        refused={reason: count for reason, count in sweep.refused.items() if count},
        seconds=decision.seconds,
        bar=sweep.bar,
        ranked=decision.ranked,
        plain=decision.plain,
    )


def _refined(
    request: Request, fitting: Sequence[Candidate], missing: Sequence[Candidate]
) -> list[Candidate]:
    """Candidates of the second stage, made of the fastest of the first."""
    if not fitting:
        missing = missing[:FRONT]
    bar = fitting[0].seconds if fitting else np.inf
    origins = [*fitting[:FRONT], *(c for c in missing[:FRONT] if c.seconds < SLOWER * bar)]
    fits = [c.layout for c in fitting[:FRONT]]
    rest = [c.layout for c in origins[len(fits) :]]
    found = refine(request, request.limits, fits, rest)
    return [Candidate(r.seconds, origins[r.origin].variant, r.layout) for r in found]


def _count_faster(request: Request, seconds: float) -> int:
    """How many layouts that fit are faster, by the closed formulas."""
    sweep = Sweep(request)
    sweep.bar = seconds
    faster = (block.fits & (block.seconds < seconds) for block in sweep.priced())
    return sum(int(table.sum()) for table in faster)
