"""Draw a pipeline schedule, with its bubble and what it holds in flight, and check it.

phalanx schedule 1f1b -p 4 -m 8
phalanx schedule interleaved -p 4 -m 8 -v 2 --svg picture.svg
phalanx schedule mine.csv --cost F=1,I=1.2,W=0.8
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from phalanx.cli import schedule_picture as picture
from phalanx.core.errors import UsageError, unknown
from phalanx.core.schedule import Kind, Schedule
from phalanx.core.timeline import Timeline
from phalanx.planner.simulate import idle_within, occupancy, peak_in_flight, simulate
from phalanx.schedules.build import build
from phalanx.schedules.check import check
from phalanx.schedules.check_lowered import check_lowered
from phalanx.schedules.file import read_schedule
from phalanx.schedules.lower import add_transfers
from phalanx.schedules.messages import SENDS, only_computing
from phalanx.schedules.registry import NAMES
from phalanx.schedules.text import to_csv

SCHEMA = 1
PRICED = {kind.value: kind for kind in Kind if kind.computes}
COLUMNS_OF_A_FILE = 1000  # where there is no terminal to fit into


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument(
        "schedule",
        metavar="NAME",
        help=f"one of {', '.join(NAMES)}, a .csv file with one line of actions per rank, or the "
        "module:attribute of a schedule of your own",
    )
    parser.add_argument("-p", type=int, help="pipeline ranks (default 4)")
    parser.add_argument("-m", type=int, help="micro-batches in a step (default 8)")
    parser.add_argument(
        "-v", type=int, help="chunks of layers per rank, where there is a choice (default 2)"
    )
    parser.add_argument(
        "--cost",
        default="",
        metavar="F=1,I=1,W=1",
        help="seconds of a forward, an input gradient and a weight gradient; B is I + W",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows, one per rank")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Build or read the schedule, prove it, play it, show it."""
    schedule = _schedule(args)
    messages = _prove(schedule)
    schedule = only_computing(schedule)
    timeline = simulate(schedule, _costs(args.cost))
    if args.csv is not None:
        _write(args.csv, to_csv(schedule))
    if args.svg is not None:
        _write(args.svg, picture.svg(schedule, timeline))
    if args.json:
        print(json.dumps(_document(schedule, timeline)))
    else:
        _show(schedule, timeline, messages)
    return 0


def _schedule(args: Namespace) -> Schedule:
    name = args.schedule
    if not name.endswith(".csv"):
        return build(name, _or(args.p, 4), _or(args.m, 8), args.v)
    schedule = read_schedule(name)
    for size in ("p", "m", "v"):
        asked, found = getattr(args, size), getattr(schedule, size)
        if asked not in (None, found):
            raise UsageError(f"{name} has {size}={found}, not {asked}; leave out -{size}")
    return schedule


def _prove(schedule: Schedule) -> int:
    """Check the rows as they will be obeyed; return how many messages they need."""
    kinds = {action.kind for row in schedule.rows for action in row}
    trains = not {Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}.isdisjoint(kinds)
    check(schedule, trains=trains)
    if only_computing(schedule) is schedule:
        schedule = add_transfers(schedule)
    check_lowered(schedule, trains=trains)
    return sum(action.kind in SENDS for row in schedule.rows for action in row)


def _costs(text: str) -> dict[Kind, float]:
    """Read `F=1,I=1.5,W=0.5`; what is not named stays 1, and B is I + W unless it is named."""
    costs = {Kind.FORWARD: 1.0, Kind.INPUT_GRAD: 1.0, Kind.WEIGHT_GRAD: 1.0}
    for word in text.replace(",", " ").split():
        letter, _, number = word.partition("=")
        if letter not in PRICED:
            raise unknown("kind of action", letter, PRICED)
        try:
            costs[PRICED[letter]] = float(number)
        except ValueError:
            raise UsageError(f"cannot read {word!r} as a cost; write {letter}=1.5") from None
    return costs


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def _document(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    found = occupancy(timeline)
    return {
        "schema": SCHEMA,
        "name": schedule.name,
        "p": schedule.p,
        "m": schedule.m,
        "v": schedule.v,
        "rows": schedule.texts(),
        "makespan": found.makespan,
        "bubble_over_ideal": found.bubble_over_ideal,
        "idle_fraction": found.idle_fraction,
        "peak_in_flight": list(peak_in_flight(schedule)),
        "checked": True,
    }


def _show(schedule: Schedule, timeline: Timeline, messages: int) -> None:
    console = Console(highlight=False)
    columns = console.width if console.is_terminal else COLUMNS_OF_A_FILE
    print(f"{schedule.name}: p={schedule.p} ranks, m={schedule.m} micro-batches, v={schedule.v}")
    if console.color_system is None or console.no_color:
        print("\n".join(picture.plain(schedule, timeline, columns)))
        print(" " * picture.MARGIN + picture.plain_legend(schedule))
    else:
        for line in picture.coloured(schedule, timeline, columns):
            console.print(line, soft_wrap=True)
        console.print(Text(" " * picture.MARGIN) + picture.coloured_legend(schedule))
    print(_summary(schedule, timeline, messages))


def _summary(schedule: Schedule, timeline: Timeline, messages: int) -> str:
    found = occupancy(timeline)
    waits = " ".join(f"{round(seconds, 9):g}" for seconds in idle_within(timeline))
    held = " ".join(str(n) for n in peak_in_flight(schedule))
    unit = (
        "micro-batches" if schedule.v == 1 else f"micro-batches x stages, v={schedule.v} to a rank"
    )
    return (
        f"makespan        {found.makespan:g} (ideal {found.ideal:g})\n"
        f"bubble          {found.bubble_over_ideal:.1%} of the ideal time, "
        f"{found.idle_fraction:.1%} of all time\n"
        f"idle inside     {waits} between the first and the last action of each rank\n"
        f"peak in flight  {held} {unit}\n"
        f"checked         complete, in order, without deadlock; {messages} messages meet in order"
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
