"""Draw a pipeline schedule, with its bubble and what it holds in flight, and check it.

phalanx schedule 1f1b -p 4 -m 8
phalanx schedule interleaved -p 4 -m 8 -v 2 --svg picture.svg
phalanx schedule mine.csv --cost F=1,I=1.2,W=0.8
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.api.schedules import CheckedSchedule

COLUMNS_OF_A_FILE = 1000  # where there is no terminal to fit into


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument(
        "schedule",
        metavar="NAME",
        help="1f1b, interleaved, zb-h1 and their like (phalanx help layout.schedule names them), "
        "a .csv file with one line of actions per rank, or the module:attribute of your own",
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
    # imported here, so that --help comes at once
    from phalanx.api.schedules import checked, unchecked
    from phalanx.cli import schedule_picture as picture
    from phalanx.schedules.text import to_csv

    found = checked(unchecked(args.schedule, args.p, args.m, args.v), _costs(args.cost))
    if args.csv is not None:
        _write(args.csv, to_csv(found))
    if args.svg is not None:
        _write(args.svg, picture.svg(found, found.timeline))
    if args.json:
        print(json.dumps(found.to_dict()))
    else:
        _show(found)
    return 0


def _costs(text: str) -> dict[str, float]:
    """Read `F=1,I=1.5,W=0.5`."""
    from phalanx.api.schedules import PRICED
    from phalanx.core.errors import UsageError, unknown

    costs = {}
    for word in text.replace(",", " ").split():
        letter, _, number = word.partition("=")
        if letter not in PRICED:
            raise unknown("kind of action", letter, PRICED)
        try:
            costs[letter] = float(number)
        except ValueError:
            raise UsageError(f"cannot read {word!r} as a cost; write {letter}=1.5") from None
    return costs


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def _show(found: "CheckedSchedule") -> None:
    from rich.console import Console
    from rich.text import Text

    from phalanx.cli import schedule_picture as picture

    console = Console(highlight=False)
    columns = console.width if console.is_terminal else COLUMNS_OF_A_FILE
    print(f"{found.name}: p={found.p} ranks, m={found.m} micro-batches, v={found.v}")
    if console.color_system is None or console.no_color:
        print("\n".join(picture.plain(found, found.timeline, columns)))
        print(" " * picture.MARGIN + picture.plain_legend(found))
    else:
        for line in picture.coloured(found, found.timeline, columns):
            console.print(line, soft_wrap=True)
        console.print(Text(" " * picture.MARGIN) + picture.coloured_legend(found))
    print(_summary(found))


def _summary(found: "CheckedSchedule") -> str:
    from phalanx.planner.simulate import idle_within

    busy = found.occupancy
    waits = " ".join(f"{round(seconds, 9):g}" for seconds in idle_within(found.timeline))
    held = " ".join(str(n) for n in found.peak_in_flight)
    unit = "micro-batches" if found.v == 1 else f"micro-batches x stages, v={found.v} to a rank"
    return (
        f"makespan        {busy.makespan:g} (ideal {busy.ideal:g})\n"
        f"bubble          {busy.bubble_over_ideal:.1%} of the ideal time, "
        f"{busy.idle_fraction:.1%} of all time\n"
        f"idle inside     {waits} between the first and the last action of each rank\n"
        f"peak in flight  {held} {unit}\n"
        f"checked         complete, in order, without deadlock; {found.messages} messages meet "
        "in order"
    )
