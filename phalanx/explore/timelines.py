"""Schedules as they are drawn: cells in fractions of the makespan, and what is in flight meanwhile.

Cells are columns: there are 8,192 of them at p=16, m=256, and every frame of a drag has others.
"""

import struct
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.schedule import Kind, Schedule
from phalanx.explore.state import Reading
from phalanx.planner.simulate import Occupancy, simulate
from phalanx.schedules.build import build
from phalanx.schedules.play import play
from phalanx.schedules.registry import find_schedule

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

COLOURS = ("f", "f2", "b", "b2", "i", "i2", "w", "w2")
FIRST = {Kind.FORWARD: 0, Kind.BACKWARD: 2, Kind.INPUT_GRAD: 4, Kind.WEIGHT_GRAD: 6}
KINDS = tuple(FIRST)
PLACE = {kind: place for place, kind in enumerate(KINDS)}
HELD = np.array([1, -1, 0, -1])  # of each kind: forward takes, what ends backward gives back
MOST_PASSES = 40_000  # that the page draws


class Pace(NamedTuple):
    """Durations of the passes: of each kind, of a hop, and of one slow stage."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    hop: float = 0.0
    slow: int = 0  # counted from 1
    times: float = 1.0


class Cells(NamedTuple):
    """All passes as they are drawn: columns, row after row.

    Attributes:
        rank: of shape (passes,), int64.
        start: fractions of the makespan, of shape (passes,), float64.
        width: fractions of the makespan, of shape (passes,), float64.
        colour: places in `COLOURS`, of shape (passes,), int64.
        microbatch: of shape (passes,), int64.
    """

    rank: Integers
    start: Floats
    width: Floats
    colour: Integers
    microbatch: Integers

    def where(self, shown: NDArray[np.bool_]) -> "Cells":
        """Some of the passes."""
        rank, start, width = self.rank[shown], self.start[shown], self.width[shown]
        return Cells(rank, start, width, self.colour[shown], self.microbatch[shown])


class InFlight(NamedTuple):
    """What is in flight on each rank, wherever it changes: columns, rank after rank.

    Attributes:
        rank: of shape (changes,), int64.
        at: fractions of the makespan, of shape (changes,), float64.
        level: micro-batches in flight from then on, of shape (changes,), int64.
    """

    rank: Integers
    at: Floats
    level: Integers


class Drawn(NamedTuple):
    """A schedule that was played.

    Attributes:
        name: of the schedule.
        title: what people call it.
        cells: all passes that take time.
        levels: micro-batches in flight.
        found: how busy ranks are.
        peak: most in flight, by rank.
        v: chunks of a rank.
    """

    name: str
    title: str
    cells: Cells
    levels: InFlight
    found: Occupancy
    peak: tuple[int, ...]
    v: int


def pace_of(state: Reading) -> Pace:
    """The durations that a state asks for.

    Args:
        state: what is read.
    """
    forward, input_grad, weight_grad, hop, times = map(
        state.number, ("F_", "I_", "W_", "hop", "by")
    )
    return Pace(forward, input_grad, weight_grad, hop, state.whole("slow"), times)


@lru_cache(maxsize=64)
def drawn(name: str, p: int, m: int, v: int, pace: Pace) -> Drawn:
    """Build a schedule and play it.

    Args:
        name: of the schedule.
        p: pipeline ranks.
        m: micro-batches.
        v: chunks; 0 for as few as it can have.
        pace: durations.

    Raises:
        RefusedError: the schedule cannot be had in these sizes.
        UsageError: every pass takes no time.
    """
    plan = _planned(name, p, m, v)
    schedule = plan.schedule
    costs = _costs(schedule, pace)
    if len(plan.kind) > MOST_PASSES or not any(map(any, costs.values())):
        simulate(schedule, costs, pace.hop)  # says what is wrong with the costs
    start = np.array(list(chain.from_iterable(play(schedule, costs, pace.hop))), dtype=np.float64)
    lasts = np.array([costs[one] for one in KINDS])[plan.kind, plan.stage]
    end = float((start + lasts).max())
    ideal = float(lasts.sum()) / p
    found = Occupancy(end, ideal, (end - ideal) / ideal, (end - ideal) / end)
    cells = Cells(plan.rank, start / end, lasts / end, plan.colour, plan.microbatch)
    shown = lasts > 0
    if not shown.all():
        cells = cells.where(shown)
    levels = _levels(plan, (start, lasts), end)
    return Drawn(name, find_schedule(name).title, cells, levels, found, plan.peak, schedule.v)


class _Planned(NamedTuple):
    """What a schedule is whatever its passes last: columns, row after row, and the peak of each rank."""

    schedule: Schedule
    rank: Integers
    stage: Integers
    kind: Integers
    microbatch: Integers
    colour: Integers
    peak: tuple[int, ...]


@lru_cache(maxsize=16)
def _planned(name: str, p: int, m: int, v: int) -> _Planned:
    schedule = build(name, p, m, v or None)
    stages, kinds, microbatches = zip(*chain.from_iterable(schedule.rows), strict=True)
    rank = np.repeat(np.arange(p), [len(row) for row in schedule.rows])
    stage, kind = np.array(stages), np.array([PLACE[one] for one in kinds])
    first = [schedule.stages_of(owner).index(s) % 2 for s, owner in enumerate(schedule.ranks)]
    colour = 2 * kind + np.array(first)[stage]
    held = np.cumsum(
        HELD[kind]
    )  # every rank ends with nothing in flight, so the next begins with it
    begins = np.flatnonzero(np.diff(rank, prepend=-1))
    peak = tuple(np.maximum.reduceat(held, begins).tolist())
    return _Planned(schedule, rank, stage, kind, np.array(microbatches), colour, peak)


def _costs(schedule: Schedule, pace: Pace) -> dict[Kind, tuple[float, ...]]:
    """Seconds by kind and stage; the slow stage takes longer."""
    depth = schedule.depth
    factors = [
        pace.times if s % depth == pace.slow - 1 else 1.0 for s in range(schedule.num_stages)
    ]
    each = {
        Kind.FORWARD: pace.forward,
        Kind.INPUT_GRAD: pace.input_grad,
        Kind.WEIGHT_GRAD: pace.weight_grad,
        Kind.BACKWARD: pace.input_grad + pace.weight_grad,
    }
    return {kind: tuple(cost * factor for factor in factors) for kind, cost in each.items()}


def _levels(plan: _Planned, spans: tuple[Floats, Floats], end: float) -> InFlight:
    """Micro-batches in flight on a rank: from a start of F to an end of B or W."""
    start, lasts = spans
    change = HELD[plan.kind]
    at = np.where(change > 0, start, start + lasts) / end
    held = change != 0
    rank, at, change = plan.rank[held], at[held], change[held]
    order = np.lexsort((change, at, rank))
    rank, at, level = rank[order], at[order], np.cumsum(change[order])
    begins = np.flatnonzero(np.diff(rank, prepend=-1))
    return InFlight(
        np.insert(rank, begins, rank[begins]),
        np.insert(at, begins, 0.0),
        np.insert(level, begins, 0),
    )


def columns(found: Drawn) -> bytes:
    """A drawn schedule as binary columns, little-endian, for the canvas.

    Four uint32 (ranks, cells, changes, greatest level); float32 starts and widths of cells, and times
    of changes; uint16 ranks and colours of cells, and ranks and levels of changes.

    Args:
        found: the schedule.
    """
    cells, levels = found.cells, found.levels
    most = max(int(levels.level.max()), 1)
    head = struct.pack("<4I", len(found.peak), len(cells.rank), len(levels.rank), most)
    reals = (cells.start, cells.width, levels.at)
    whole = (cells.rank, cells.colour, levels.rank, levels.level)
    return head + b"".join(
        [column.astype("<f4").tobytes() for column in reals]
        + [column.astype("<u2").tobytes() for column in whole]
    )
