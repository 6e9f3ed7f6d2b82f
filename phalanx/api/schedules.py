"""Pipeline schedules as `phalanx.schedule` gives them: built, proved, and timed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from phalanx.core.errors import UsageError, require_type, require_whole, unknown
from phalanx.core.html import html_table
from phalanx.core.schedule import Kind, Schedule
from phalanx.core.timeline import Timeline
from phalanx.planner.simulate import Occupancy, occupancy, peak_in_flight, simulate
from phalanx.schedules.build import build
from phalanx.schedules.check import check
from phalanx.schedules.check_lowered import check_lowered
from phalanx.schedules.file import read_schedule
from phalanx.schedules.lower import add_transfers
from phalanx.schedules.messages import SENDS, only_computing

SCHEMA = 1
PRICED = {kind.value: kind for kind in Kind if kind.computes}


@dataclass(frozen=True)
class CheckedSchedule(Schedule):
    """A schedule that is complete, in order and without deadlock, and how long it takes.

    Attributes:
        timeline: when every action starts and ends, at the costs that were given.
        messages: how many its ranks send each other.

    Example:
        >>> import phalanx
        >>> found = phalanx.schedule("1f1b", p=4, m=8)
        >>> found.texts()[3][:4]
        ['3F0', '3B0', '3F1', '3B1']
        >>> round(found.occupancy.bubble_over_ideal, 3)  # (p - 1) / m
        0.375
    """

    timeline: Timeline = field(default_factory=lambda: Timeline("planned", ()))
    messages: int = 0

    @property
    def occupancy(self) -> Occupancy:
        """How well the ranks are kept busy: makespan, ideal, and the bubble in both forms."""
        return occupancy(self.timeline)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each rank holds, counted per stage."""
        return peak_in_flight(self)

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx schedule --json` prints."""
        found = self.occupancy
        return {
            "schema": SCHEMA,
            "name": self.name,
            "p": self.p,
            "m": self.m,
            "v": self.v,
            "rows": self.texts(),
            "makespan": found.makespan,
            "bubble_over_ideal": found.bubble_over_ideal,
            "idle_fraction": found.idle_fraction,
            "peak_in_flight": list(self.peak_in_flight),
            "checked": True,
        }

    def _repr_html_(self) -> str:
        """The rows as a table, for a notebook."""
        title = (
            f"{self.name}: p={self.p}, m={self.m}, v={self.v}, "
            f"bubble {self.occupancy.bubble_over_ideal:.1%} of the ideal time"
        )
        rows = [(f"rank {rank}", *row) for rank, row in enumerate(self.texts())]
        return html_table(title, rows)


def schedule(
    name: str,
    p: int,
    m: int,
    v: int = 1,
    *,
    costs: Mapping[str, float] | None = None,
) -> CheckedSchedule:
    """Build a pipeline schedule, prove it, and play it.

    Args:
        name: 1f1b, interleaved, zb-h1 ..., or a `.csv` file with one line of actions per rank.
        p: pipeline ranks.
        m: micro-batches per step.
        v: stages per rank; 1 means as few as the schedule can have.
        costs: seconds of F, I and W, by letter; what is not named lasts 1, and B lasts I + W.

    Returns:
        The schedule with its timeline, bubble and peak in flight.

    Raises:
        UsageError: nobody knows the name, a size is below 1, or a cost is no duration.
        RefusedError: the schedule cannot be had in these sizes.
        ScheduleError: the rows of a file are incomplete, out of order, or wait for ever.

    Example:
        >>> import phalanx
        >>> phalanx.schedule("gpipe", p=2, m=2).texts()
        [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1F1', '1B0', '1B1']]
    """
    for size, value in (("p", p), ("m", m), ("v", v)):
        require_whole(size, value)
    return checked(unchecked(name, p, m, v if v > 1 else None), costs)


def unchecked(name: str, p: int | None, m: int | None, v: int | None) -> Schedule:
    """Build or read the rows.

    Args:
        name: of a schedule, or of a `.csv` file.
        p: pipeline ranks; None means 4, or what a file has.
        m: micro-batches per step; None means 8, or what a file has.
        v: stages per rank; None means as few as can be, or what a file has.

    Raises:
        UsageError: nobody knows the name, or a file has other sizes.
        RefusedError: the schedule cannot be had in these sizes.
    """
    require_type("schedule", name, str, "the name of one, or of a .csv file of rows")
    if not name.endswith(".csv"):
        return build(name, 4 if p is None else p, 8 if m is None else m, v)
    found = read_schedule(name)
    for size, wanted in (("p", p), ("m", m), ("v", v)):
        if wanted not in (None, getattr(found, size)):
            raise UsageError(
                f"{name} has {size}={getattr(found, size)}, not {wanted}; leave out -{size}"
            )
    return found


def checked(rows: Schedule, costs: Mapping[str, float] | None = None) -> CheckedSchedule:
    """Prove rows as they will be obeyed, and play them.

    Args:
        rows: of every rank, with messages or without.
        costs: seconds by letter of the kind of action; see `schedule`.

    Raises:
        ScheduleError: incomplete, out of order, or waiting for ever.
        UsageError: a cost of no known kind, or no duration.
    """
    messages = _prove(rows)
    computing = only_computing(rows)
    values = {f.name: getattr(computing, f.name) for f in fields(Schedule)}
    timeline = simulate(computing, _costs(costs or {}))
    return CheckedSchedule(**values, timeline=timeline, messages=messages)


def _prove(rows: Schedule) -> int:
    """Check the rows as they will be obeyed; return how many messages they need."""
    kinds = {action.kind for row in rows.rows for action in row}
    trains = not {Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}.isdisjoint(kinds)
    check(rows, trains=trains)
    lowered = add_transfers(rows) if only_computing(rows) is rows else rows
    check_lowered(lowered, trains=trains)
    return sum(action.kind in SENDS for row in lowered.rows for action in row)


def _costs(costs: Mapping[str, float]) -> dict[Kind, float]:
    """Seconds by kind; what is not named stays 1, and B is I + W unless it is named."""
    seconds = {Kind.FORWARD: 1.0, Kind.INPUT_GRAD: 1.0, Kind.WEIGHT_GRAD: 1.0}
    for letter, cost in costs.items():
        if letter not in PRICED:
            raise unknown("kind of action", letter, PRICED)
        require_type(f"the cost of {letter}", cost, (int, float), "a number of seconds")
        seconds[PRICED[letter]] = cost
    return seconds
