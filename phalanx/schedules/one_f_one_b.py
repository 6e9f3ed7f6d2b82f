"""1F1B: after a warm-up, every rank alternates one forward with one backward.

Symbols: p pipeline ranks, m micro-batches; F, B seconds of a forward and of a backward.
Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1.
"""

from collections.abc import Iterator

import numpy as np

from phalanx.core.schedule import Action, Kind, Row
from phalanx.schedules.bubble import PaperBubble, PassSeconds
from phalanx.schedules.formulas import Floats, Integers, Peaks, Pipes, around, smallest
from phalanx.schedules.placement import looped
from phalanx.schedules.spec import ScheduleSpec


def rows(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches over `p` ranks.

    Rank r holds at most min(p - r, m) micro-batches in flight, and the step lasts
    (m + p - 1) forward-backward pairs: a bubble of (p - 1) / m.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: not read: it is 1.

    Example:
        >>> for row in rows(p=2, m=3, v=1):
        ...     print(*row)
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    return tuple(tuple(_row(stage, p, m)) for stage in range(p))


def _row(stage: int, p: int, m: int) -> Iterator[Action]:
    warmup = min(p - 1 - stage, m)
    for i in range(warmup):
        yield Action(stage, Kind.FORWARD, i)
    for i in range(m - warmup):
        yield Action(stage, Kind.FORWARD, warmup + i)
        yield Action(stage, Kind.BACKWARD, i)
    for i in range(m - warmup, m):
        yield Action(stage, Kind.BACKWARD, i)


def makespan(x: Pipes) -> Floats:
    """One micro-batch through all, and a period for each of the others.

    A rank that holds p micro-batches cannot start the next before the first has come back.
    """
    period = np.where(x.m > x.p, np.maximum(x.worst, around(x) / x.p), x.worst)
    return around(x) + (x.m - 1) * period


def in_flight(x: Peaks) -> Integers:
    """Micro-batches of a rank at its peak: min(p - r, m)."""
    return smallest((x.p - x.rank, x.m))


def _idle(p: int, v: int, seconds: PassSeconds) -> float:
    return (p - 1) * (seconds.F + seconds.B)


ONE_F_ONE_B = ScheduleSpec(
    name="1f1b",
    title="1F1B",
    description="one forward, one backward in turn: no more in flight than there are ranks",
    source="Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1",
    rows=rows,
    placement=looped,
    makespan=makespan,
    in_flight=in_flight,
    bubble=PaperBubble("(p-1) (F+B)", _idle),
)
