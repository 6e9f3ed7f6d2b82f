"""Interleaved 1F1B: every rank holds v chunks of layers, so that the pipeline fills v times sooner.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank; stage s lives on rank s mod p.
Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2.
"""

from collections.abc import Iterator

from phalanx.core.schedule import Action, Kind, Row
from phalanx.schedules.bubble import PaperBubble, PassSeconds
from phalanx.schedules.formulas import Floats, Integers, Peaks, Pipes, smallest
from phalanx.schedules.placement import looped
from phalanx.schedules.sizes import SEVERAL, Sizes
from phalanx.schedules.spec import ScheduleSpec


def rows(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches, a multiple of p, over `p` ranks with `v` chunks each.

    The bubble is (p - 1) / (v m). Rank r holds at most (v - 1) p + 2 (p - 1 - r) + 1
    chunks in flight (or all v m), each 1/v of its layers.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: chunks of layers per rank, at least 2.

    Example:
        >>> for row in rows(p=2, m=2, v=2):
        ...     print(*row)
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    return tuple(tuple(_row(rank, p, m, v)) for rank in range(p))


def _row(rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    warmup = min((v - 1) * p + 2 * (p - 1 - rank), v * m)
    for k in range(warmup):
        yield _forward(k, rank, p, v)
    for k in range(v * m - warmup):
        yield _forward(warmup + k, rank, p, v)
        yield _backward(k, rank, p, v)
    for k in range(v * m - warmup, v * m):
        yield _backward(k, rank, p, v)


def _forward(k: int, rank: int, p: int, v: int) -> Action:
    """The k-th forward of a rank: p micro-batches through chunk 0, the same p through chunk 1..."""
    group, place = divmod(k, p * v)
    chunk, i = divmod(place, p)
    return Action(chunk * p + rank, Kind.FORWARD, group * p + i)


def _backward(k: int, rank: int, p: int, v: int) -> Action:
    """The k-th backward of a rank: as the forwards, but through the last chunk first."""
    group, place = divmod(k, p * v)
    chunk, i = divmod(place, p)
    return Action((v - 1 - chunk) * p + rank, Kind.BACKWARD, group * p + i)


def _micro_batches(p: int) -> Sizes:
    return Sizes(least=p, multiple=p)


def _makespan(x: Pipes) -> Floats:
    """The other ranks wait for one chunk, not for one rank's whole share."""
    return x.m * x.worst + (x.p - 1) * (x.total / (x.p * x.v) + 2 * x.hop)


def _in_flight(x: Peaks) -> Integers:
    """min((v - 1) p + 2 (p - 1 - r) + 1, v m)."""
    return smallest(((x.v - 1) * x.p + 2 * (x.p - 1 - x.rank) + 1, x.v * x.m))


def _idle(p: int, v: int, seconds: PassSeconds) -> float:
    return (p - 1) * (seconds.F + seconds.B) / v


INTERLEAVED = ScheduleSpec(
    name="interleaved",
    title="interleaved",
    description="1F1B over v chunks of layers per rank: a bubble v times smaller, more messages",
    source="Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2",
    rows=rows,
    placement=looped,
    ranks=SEVERAL,
    micro_batches=_micro_batches,
    chunks=SEVERAL,
    makespan=_makespan,
    in_flight=_in_flight,
    bubble=PaperBubble("(p-1) (F+B) / v", _idle),
)
