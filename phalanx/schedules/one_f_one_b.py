"""1F1B: after a warm-up, every rank alternates one forward with one backward.

Symbols: p pipeline ranks, m micro-batches.
Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1.
"""

from collections.abc import Iterator

from phalanx.core.schedule import Action, Kind, Schedule


def one_f_one_b(p: int, m: int) -> Schedule:
    """Order the work of `m` micro-batches over `p` ranks.

    Rank r holds at most min(p - r, m) micro-batches in flight, and the step lasts
    (m + p - 1) forward-backward pairs: a bubble of (p - 1) / m.
    """
    rows = tuple(tuple(_row(stage, p, m)) for stage in range(p))
    return Schedule("1f1b", p, m, 1, rows, ranks=tuple(range(p)))


def _row(stage: int, p: int, m: int) -> Iterator[Action]:
    warmup = min(p - 1 - stage, m)
    for i in range(warmup):
        yield Action(stage, Kind.FORWARD, i)
    for i in range(m - warmup):
        yield Action(stage, Kind.FORWARD, warmup + i)
        yield Action(stage, Kind.BACKWARD, i)
    for i in range(m - warmup, m):
        yield Action(stage, Kind.BACKWARD, i)
