"""Play a schedule against a clock: how long the step takes, who waits, and what is held meanwhile.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.core.errors import UsageError
from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.core.timeline import Span, Timeline
from phalanx.schedules.messages import only_computing
from phalanx.schedules.play import UNIT, Costs, play, seconds_table


class Occupancy(NamedTuple):
    """How well the ranks are kept busy. Both forms of the bubble are in use: name the one you mean.

    Attributes:
        makespan: seconds from the start of the first action to the end of the last.
        ideal: seconds if every rank were always busy: the work of all ranks over their number.
        bubble_over_ideal: (makespan - ideal) / ideal; Megatron's (p - 1) / m.
        idle_fraction: (makespan - ideal) / makespan; GPipe's (p - 1) / (m + p - 1).
    """

    makespan: float
    ideal: float
    bubble_over_ideal: float
    idle_fraction: float


def simulate(schedule: Schedule, costs: Costs = UNIT, hop: float = 0.0) -> Timeline:
    """Start every action as soon as its rank is free and its inputs have arrived.

    Args:
        schedule: the rows; messages and reductions in them are left out, `hop` stands for them.
        costs: seconds of each kind of action, as one number or one per stage. Without B, it is
            I + W.
        hop: seconds to carry one tensor to another rank; it delays the receiver only.

    Raises:
        UsageError: a cost is missing or no duration.
        ScheduleError: some rank waits for ever; the message says which, and before what.
    """
    schedule = only_computing(schedule)
    if not 0 <= hop < math.inf:
        raise UsageError(f"hop is {hop}; it must be finite and at least 0 seconds")
    seconds = _seconds(schedule, costs)
    spans = tuple(
        Span(rank, str(action), "compute", start, start + seconds[action.kind][action.stage])
        for rank, starts in enumerate(play(schedule, seconds, hop))
        for action, start in zip(schedule.rows[rank], starts, strict=True)
    )
    return Timeline("planned", spans)


def occupancy(timeline: Timeline) -> Occupancy:
    """Summarise the computing spans of a timeline, planned or measured; it needs at least one.

    Example:
        >>> from phalanx.schedules.build import build
        >>> found = occupancy(simulate(build("1f1b", p=4, m=8)))
        >>> found.makespan, found.bubble_over_ideal
        (33.0, 0.375)
    """
    spans = [span for span in timeline.spans if span.category == "compute"]
    makespan = max(span.end for span in spans) - min(span.start for span in spans)
    ideal = math.fsum(span.seconds for span in spans) / len({span.rank for span in spans})
    return Occupancy(makespan, ideal, (makespan - ideal) / ideal, (makespan - ideal) / makespan)


def idle_within(timeline: Timeline) -> tuple[float, ...]:
    """Seconds that each rank idles between its own first and last computing span.

    The greatest is the bubble of the zero-bubble papers (Qi et al. 2024, arXiv:2401.10241,
    section 2.3): a rank that starts late and ends as much later has lost nothing.

    Returns:
        Of every rank that computes, ascending.
    """
    ranks: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if span.category == "compute":
            ranks.setdefault(span.rank, []).append(span)
    return tuple(_idle(ranks[rank]) for rank in sorted(ranks))


def _idle(spans: Sequence[Span]) -> float:
    lasted = max(span.end for span in spans) - min(span.start for span in spans)
    return lasted - math.fsum(span.seconds for span in spans)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most micro-batches whose activations each rank holds at once, counted per stage.

    A micro-batch on a stage is in flight from its F to its B, or to its W where backward is
    split. A rank with v stages counts each of them, so its unit is 1/v of its layers.
    """
    return tuple(_peak(row) for row in schedule.rows)


_HELD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1}


def _peak(row: Sequence[Action]) -> int:
    held = peak = 0
    for action in row:
        held += _HELD.get(action.kind, 0)
        peak = max(peak, held)
    return peak


def _seconds(schedule: Schedule, costs: Costs) -> Mapping[Kind, Sequence[float]]:
    """Seconds of each kind and stage; a whole backward without a cost lasts as its two halves."""
    for kind, cost in costs.items():
        values = cost if isinstance(cost, Sequence) else [cost]
        if not all(0 <= value < math.inf for value in values):
            raise UsageError(
                f"the cost of {kind.value} is {cost}; it must be finite and at least 0"
            )
        if isinstance(cost, Sequence) and len(cost) != schedule.num_stages:
            raise UsageError(
                f"{len(cost)} costs of {kind.value} for {schedule.num_stages} stages; "
                "give one, or one per stage"
            )
    table = seconds_table(schedule, costs)
    known = set(costs)
    if Kind.BACKWARD not in known and {Kind.INPUT_GRAD, Kind.WEIGHT_GRAD} <= known:
        halves = zip(table[Kind.INPUT_GRAD], table[Kind.WEIGHT_GRAD], strict=True)
        table[Kind.BACKWARD] = tuple(i + w for i, w in halves)
        known.add(Kind.BACKWARD)
    unknown = {action.kind for row in schedule.rows for action in row} - known
    if unknown:
        kinds = ", ".join(sorted(kind.value for kind in unknown))
        raise UsageError(f"no cost for {kinds} in {schedule.name}; give F, and B or I and W")
    if not any(table[action.kind][action.stage] for row in schedule.rows for action in row):
        raise UsageError("every action costs 0; give at least one of F, B, I and W a duration")
    return table
