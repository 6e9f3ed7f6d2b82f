"""Forward only: the rows of an evaluation, which has no backwards.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank.
"""

from collections.abc import Iterator

from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.schedules.placement import Placement


def forward_only(where: Placement, m: int) -> Schedule:
    """Order the forwards of `m` micro-batches over the stages of one copy of the model.

    Any placement and m will do. Micro-batches go p at a time through all chunks, so the bubble is
    (p - 1) / (v m) where p divides m and stage s lives on rank s mod p.

    Args:
        where: the rank that holds each stage.
        m: micro-batches per step.
    """
    ranks = where.ranks[: where.depth]
    p = max(ranks) + 1
    rows = tuple(
        tuple(_row([s for s, holder in enumerate(ranks) if holder == rank], p, m))
        for rank in range(p)
    )
    return Schedule("forward-only", p, m, len(ranks) // p, rows, ranks)


def _row(stages: list[int], p: int, m: int) -> Iterator[Action]:
    for first in range(0, m, p):
        for stage in stages:
            for i in range(first, min(first + p, m)):
                yield Action(stage, Kind.FORWARD, i)
