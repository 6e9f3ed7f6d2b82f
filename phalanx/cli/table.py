"""Prints rows of values as a table for a screen, as markdown, or as CSV."""

import csv
import io
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

FORMATS = ("table", "markdown", "csv")
UNLIMITED = 10_000  # columns, where no terminal sets a width


def format_argument(parser: ArgumentParser) -> None:
    """Declare `--json` and `--format`, which every listing takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--format", choices=FORMATS, default="table", help="how to print (default table)"
    )


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], form: str) -> None:
    """Print rows below headers; columns of numbers are aligned right.

    Args:
        headers: one for each column.
        rows: of cells.
        form: table, markdown or csv.
    """
    if form == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([headers, *rows])
        sys.stdout.write(text.getvalue())
    elif form == "markdown":
        for row in (headers, ["---"] * len(headers), *rows):
            print(f"| {' | '.join(row)} |")
    else:
        _print_aligned(headers, rows)


def print_facts(facts: Sequence[tuple[str, str]], form: str) -> None:
    """Print one thing's properties, one to a line; those without a value are left out.

    Args:
        facts: names and values.
        form: table, markdown or csv.
    """
    known = [(name, value) for name, value in facts if value]
    if form == "table":
        width = max(len(name) for name, _ in known)
        for name, value in known:
            print(f"{name:{width}}  {value}")
    else:
        print_table(("property", "value"), known, form)


def _print_aligned(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, header in enumerate(headers):
        cells = [row[column] for row in rows if row[column] != "-"]
        numeric = bool(cells) and all(cell[:1].isdigit() for cell in cells)
        table.add_column(header, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if sys.stdout.isatty():
        Console(highlight=False, markup=False).print(table, soft_wrap=True)
        return
    console = Console(width=UNLIMITED, highlight=False, markup=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
