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
    from phalanx.cli import published_record as record
    from phalanx.cli.table import print_table
    from phalanx.planner.published.rows import read_rows
    from phalanx.planner.published.runs import predict_all
    from phalanx.planner.published.scores import summarize

    predictions = predict_all(read_rows(args.file))
    summary = summarize(predictions)
    if args.json:
        print(json.dumps(record.document(predictions, summary), indent=2))
        return 0
    if not args.summary:
        print_table(
            record.ROW_HEADERS, [record.row(p) for p in predictions if not p.skipped], args.format
        )
        print()
    print_table(
        record.SCORE_HEADERS, [record.score_row(score) for score in summary.groups], args.format
    )
    for line in (*record.skipped(predictions), *record.closing(predictions, summary)):
        print(line)
    return 0
