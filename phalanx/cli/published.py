"""Predict a table of published training runs, and say how far off that is.

phalanx published benchmarks/published/runs_validate.csv
phalanx published runs.csv --json

Every row is predicted from its own columns with one set of constants per accelerator; beside it
stands the same utilisation for all rows of an accelerator.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from phalanx.cli.table import format_argument


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
    scores = [screen.score_row(score) for score in accuracy.groups]
    print_table(screen.SCORE_HEADERS, scores, args.format)
    for line in (*screen.skipped(predictions), *screen.closing(predictions, accuracy)):
        print(line)
    return 0
