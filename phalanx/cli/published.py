"""Predict a table of published training runs, and say how far off that is.

phalanx published benchmarks/published/runs_validate.csv
phalanx published runs.csv --json

Every row is predicted from its own columns with one set of constants per accelerator; beside it
stands the same utilisation for all rows of an accelerator.
"""

import json
import textwrap
from argparse import ArgumentParser, Namespace
from pathlib import Path

from phalanx.cli.table import format_argument

WIDTH = 80  # columns of what is printed


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="one published run per row")
    parser.add_argument("--summary", action="store_true", help="leave the rows out")
    format_argument(parser)


def run(args: Namespace) -> int:
    """Read the rows, predict each, compare."""
    # imported here, so that --help comes at once
    from phalanx.api.publications import published
    from phalanx.cli import published_screen as screen
    from phalanx.cli.table import print_table

    found = published(args.file)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    predictions, accuracy = found.predictions, found.accuracy
    if not args.summary:
        shown = [screen.row(p) for p in predictions if not p.skipped]
        print_table(screen.ROW_HEADERS, shown, args.format)
        print()
        peaks = [screen.peak_row(p) for p in predictions if p.published_peak_bytes is not None]
        if peaks:
            print_table(screen.PEAK_HEADERS, peaks, args.format)
            print()
    scores = [screen.score_row(score) for score in accuracy.groups]
    print_table(screen.SCORE_HEADERS, scores, args.format)
    of_peaks = [screen.peak_score_row(score) for score in accuracy.groups if score.memory]
    if of_peaks:
        print()
        print_table(screen.PEAK_SCORE_HEADERS, of_peaks, args.format)
    for line in (*screen.skipped(predictions), *screen.closing(predictions, accuracy)):
        print(
            textwrap.fill(line, WIDTH, break_on_hyphens=False) if args.format == "table" else line
        )
    return 0
