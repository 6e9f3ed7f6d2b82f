"""Waves: GPipe, p micro-batches at a time, so that no more than p are ever in flight.

A schedule from outside, as docs/guides/add-a-schedule.md writes it.
Symbols: p pipeline ranks, m micro-batches.
"""

from collections.abc import Iterator

import numpy as np

from phalanx.core.schedule import Action, Kind, Row
from phalanx.schedules.formulas import Floats, Integers, Peaks, Pipes, around, smallest
from phalanx.schedules.placement import looped
from phalanx.schedules.spec import ScheduleSpec


def rows(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches over `p` ranks."""
    return tuple(tuple(_row(stage, p, m)) for stage in range(p))


def _row(stage: int, p: int, m: int) -> Iterator[Action]:
    for first in range(0, m, p):
        wave = range(first, min(first + p, m))
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            for i in wave:
                yield Action(stage, kind, i)


def _makespan(x: Pipes) -> Floats:
    """The pipeline fills and drains once for every wave."""
    waves = np.ceil(x.m / x.p)
    return waves * around(x) + (x.m - waves) * x.worst


def _in_flight(x: Peaks) -> Integers:
    return smallest((x.p, x.m))


WAVES = ScheduleSpec(
    name="waves",
    title="waves",
    description="GPipe, p micro-batches at a time",
    source="docs/guides/add-a-schedule.md",
    rows=rows,
    placement=looped,
    makespan=_makespan,
    in_flight=_in_flight,
)
