"""Say what to change: on this machine before a run, or in a run that was done.

phalanx doctor               # versions, cores, limits, disk, clock; GPUs and NCCL if there are any
phalanx doctor runs/NAME     # causes of lost time, in the order in which to check them

Each cause is seen or not, with its evidence, a change to make, and what the planner expects of it.
"""

import json
import textwrap
from argparse import ArgumentParser, Namespace
from pathlib import Path

from phalanx.cli.table import format_argument

WIDTH = 96
INDENT = " " * 5


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="the folder of a run; else this machine"
    )
    parser.add_argument("--cluster", help="the devices of the run: a name, or a .toml file")
    format_argument(parser)


def run(args: Namespace) -> int:
    """Look, and print what was found."""
    from phalanx.api.reports import doctor
    from phalanx.cli.report_screen import printable, shown_rows
    from phalanx.cli.table import print_table
    from phalanx.core.units import show_share
    from phalanx.reports.finding import HEADERS, rows

    found = doctor(args.run, cluster=args.cluster)
    if args.json:
        print(json.dumps(found.to_dict(), allow_nan=False))
        return 0
    if args.format != "table":
        print_table(HEADERS, shown_rows(rows(found.findings)), args.format)
        return 0
    for finding in found.findings:
        mark = "seen" if finding.seen else " ok "
        _fold(f"{mark} {finding.cause}: {printable(finding.evidence)}")
        if finding.change:
            gain = finding.expected_gain
            hope = "" if gain is None else f"  (expected: {show_share(gain)})"
            print(f"{INDENT}-> {printable(finding.change)}{hope}")
    if not found.findings:
        print("no step is done yet: there is nothing to look at")
    for note in found.notes:
        _fold(printable(note))
    return 0


def _fold(text: str) -> None:
    print(textwrap.fill(text, WIDTH, subsequent_indent=INDENT, break_on_hyphens=False))
