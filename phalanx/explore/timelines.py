"""Schedules as they are drawn: cells in fractions of the makespan, and what is in flight meanwhile."""

import struct
from array import array
from functools import lru_cache
from typing import NamedTuple

from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.explore.state import Reading
from phalanx.planner.simulate import Occupancy, peak_in_flight, simulate
from phalanx.schedules.build import build
from phalanx.schedules.play import play, seconds_table
from phalanx.schedules.registry import find_schedule

COLOURS = ("f", "f2", "b", "b2", "i", "i2", "w", "w2")
FIRST = {Kind.FORWARD: 0, Kind.BACKWARD: 2, Kind.INPUT_GRAD: 4, Kind.WEIGHT_GRAD: 6}
HELD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1}
MOST_PASSES = 40_000  # that the page draws


class Pace(NamedTuple):
    """Durations of the passes: of each kind, of a hop, and of one slow stage."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    hop: float = 0.0
    slow: int = 0  # counted from 1
    times: float = 1.0


class DrawnPass(NamedTuple):
    """One pass as it is drawn."""

    rank: int
    start: float  # fractions of the makespan
    width: float
    colour: int  # of `COLOURS`
    microbatch: int


class Drawn(NamedTuple):
    """A schedule that was played.

    Attributes:
        name: of the schedule.
        title: what people call it.
        cells: all passes.
        levels: for each rank, (fraction, micro-batches in flight from then on).
        found: how busy ranks are.
        peak: most in flight, by rank.
        v: chunks of a rank.
    """

    name: str
    title: str
    cells: tuple[DrawnPass, ...]
    levels: tuple[tuple[tuple[float, int], ...], ...]
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
    schedule = build(name, p, m, v or None)
    costs = _costs(schedule, pace)
    if sum(len(row) for row in schedule.rows) > MOST_PASSES or not any(map(any, costs.values())):
        simulate(schedule, costs, pace.hop)  # says what is wrong with the costs
    seconds = seconds_table(schedule, costs)
    starts = play(schedule, costs, pace.hop)
    spans = [
        [(start, seconds[a.kind][a.stage], a) for start, a in zip(begun, row, strict=True)]
        for begun, row in zip(starts, schedule.rows, strict=True)
    ]
    end = max(start + lasts for row in spans for start, lasts, _ in row)
    ideal = sum(lasts for row in spans for _, lasts, _ in row) / p
    found = Occupancy(end, ideal, (end - ideal) / ideal, (end - ideal) / end)
    first = {
        stage: rank_stages.index(stage) % 2
        for rank_stages in map(schedule.stages_of, range(p))
        for stage in rank_stages
    }
    cells = tuple(
        DrawnPass(rank, start / end, lasts / end, FIRST[a.kind] + first[a.stage], a.microbatch)
        for rank, row in enumerate(spans)
        for start, lasts, a in row
        if lasts > 0
    )
    levels = tuple(_levels(row, end) for row in spans)
    return Drawn(
        name, find_schedule(name).title, cells, levels, found, peak_in_flight(schedule), schedule.v
    )


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


def _levels(row: list[tuple[float, float, Action]], end: float) -> tuple[tuple[float, int], ...]:
    """Micro-batches in flight on a rank, wherever they change: from a start of F to an end of B or W."""
    changes = []
    for start, lasts, action in row:
        change = HELD.get(action.kind, 0)
        if change:
            changes.append(((start if change > 0 else start + lasts) / end, change))
    level, found = 0, [(0.0, 0)]
    for at, change in sorted(changes):
        level += change
        found.append((at, level))
    return tuple(found)


def columns(found: Drawn) -> bytes:
    """A drawn schedule as binary columns, little-endian, for the canvas.

    Four uint32 (ranks, cells, changes, greatest level); float32 starts and widths of cells, and times
    of changes; uint16 ranks and colours of cells, and ranks and levels of changes.

    Args:
        found: the schedule.
    """
    changes = [(at, rank, level) for rank, row in enumerate(found.levels) for at, level in row]
    most = max((level for _, _, level in changes), default=1)
    head = struct.pack("<4I", len(found.levels), len(found.cells), len(changes), max(most, 1))
    parts: list[array[float] | array[int]] = [
        array("f", [c.start for c in found.cells]),
        array("f", [c.width for c in found.cells]),
        array("f", [at for at, _, _ in changes]),
        array("H", [c.rank for c in found.cells]),
        array("H", [c.colour for c in found.cells]),
        array("H", [rank for _, rank, _ in changes]),
        array("H", [level for _, _, level in changes]),
    ]
    return head + b"".join(part.tobytes() for part in parts)
