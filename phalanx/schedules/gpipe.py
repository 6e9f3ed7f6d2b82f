"""GPipe: every rank does all its forwards, then all its backwards.

Symbols: p pipeline ranks, m micro-batches; F, B seconds of a forward and of a backward.
Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3.
"""

from collections.abc import Iterator

from phalanx.core.schedule import Action, Kind, Row
from phalanx.schedules.bubble import PaperBubble, PassSeconds
from phalanx.schedules.formulas import Floats, Integers, Peaks, Pipes, around
from phalanx.schedules.placement import looped
from phalanx.schedules.spec import ScheduleSpec


def rows(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches over `p` ranks.

    Every rank holds all m micro-batches in flight, and the step lasts (m + p - 1)
    forward-backward pairs: a bubble of (p - 1) / m. Backwards run in the order of the
    forwards, so that gradients are summed in the same order as under 1F1B.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: not read: it is 1.

    Example:
        >>> for row in rows(p=2, m=2, v=1):
        ...     print(*row)
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    return tuple(tuple(_row(stage, m)) for stage in range(p))


def _row(stage: int, m: int) -> Iterator[Action]:
    for i in range(m):
        yield Action(stage, Kind.FORWARD, i)
    for i in range(m):
        yield Action(stage, Kind.BACKWARD, i)


def _makespan(x: Pipes) -> Floats:
    """One micro-batch through all, and the busiest rank's time for each of the others."""
    return around(x) + (x.m - 1) * x.worst


def _in_flight(x: Peaks) -> Integers:
    return x.m


def _idle(p: int, v: int, seconds: PassSeconds) -> float:
    return (p - 1) * (seconds.F + seconds.B)


GPIPE = ScheduleSpec(
    name="gpipe",
    title="GPipe",
    description="all forwards, then all backwards",
    source="Huang et al. 2019 (arXiv:1811.06965), section 2.3",
    rows=rows,
    placement=looped,
    makespan=_makespan,
    in_flight=_in_flight,
    bubble=PaperBubble("(p-1) (F+B)", _idle),
)
