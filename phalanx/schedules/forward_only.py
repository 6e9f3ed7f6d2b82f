"""Forward only: the rows of an evaluation, which has no backwards.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank; stage s lives on rank s mod p.
"""

from collections.abc import Iterator

from phalanx.core.schedule import Action, Kind, Schedule


def forward_only(p: int, m: int, v: int) -> Schedule:
    """Order the forwards of `m` micro-batches over `p` ranks with `v` chunks each.

    Any p, m and v will do. Micro-batches go p at a time through all chunks, so the bubble is
    (p - 1) / (v m) where p divides m.
    """
    rows = tuple(tuple(_row(rank, p, m, v)) for rank in range(p))
    return Schedule("forward-only", p, m, v, rows, ranks=tuple(s % p for s in range(p * v)))


def _row(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    for first in range(0, m, p):
        for chunk in range(v):
            for i in range(first, min(first + p, m)):
                yield Action(chunk * p + rank, Kind.FORWARD, i)
