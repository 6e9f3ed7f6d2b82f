"""Finds the best layout: looks at all that divide, counts what is refused, prices the rest.

Bytes and seconds of all layouts are computed by column (`plan/sweep.py`); the fastest of every
mesh are then priced one by one by `estimate`, which decides about their order (`plan/finals.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.core.estimate import Estimate
from phalanx.plan.finals import Contenders, Prices, Ranked, decide, rank_among
from phalanx.plan.sweep import Request, Sweep


@dataclass(frozen=True)
class Found:
    """The answer.

    Attributes:
        request: the question.
        considered: layouts that divide the devices and the batch.
        refused: how many of them were refused, by reason.
        seconds: of all that fit, ascending, by the closed formulas.
        ranked: the best layout of each mesh, fastest first; empty where none fits.
    """

    request: Request
    considered: int
    refused: Mapping[str, int]
    seconds: NDArray[np.float32]
    ranked: tuple[Ranked, ...]

    @property
    def feasible(self) -> int:
        """How many layouts fit."""
        return len(self.seconds)

    def rank(self, price: Estimate) -> int:
        """The place that a layout with this price has among all that fit."""
        shown = {ranked.estimate.layout: ranked.rank for ranked in self.ranked}
        return shown.get(price.layout, rank_among(self.seconds, price.step_seconds))


def search(request: Request) -> Found:
    """Look at every layout.

    Raises:
        RefusedError: a limit leaves nothing that divides, or the devices lack the number format.
    """
    sweep = Sweep(request)
    contenders = Contenders(sweep.where)
    seconds, variants = [np.empty(0, np.float32)], [np.empty(0, np.int16)]
    for block in sweep.priced():
        contenders.add(block.rows, block.sharding, np.where(block.fits, block.seconds, np.inf))
        seconds.append(block.seconds[block.fits].astype(np.float32))
        column = block.rows.variant.astype(np.int16)[:, None]
        variants.append(np.broadcast_to(column, block.fits.shape)[block.fits])
    prices = Prices(np.concatenate(seconds), np.concatenate(variants))
    decision = decide(request, contenders.fastest(), prices)
    refused = {reason: count for reason, count in sweep.refused.items() if count}
    return Found(request, sweep.considered, refused, decision.seconds, decision.ranked)
