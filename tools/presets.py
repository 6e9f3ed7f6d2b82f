"""Writes the published runs that the explorer shows: of each source the smallest and the largest.

They are chosen by size alone, from the rows that nothing was fitted to, among those that name their
layout completely and how long a step took. A test holds the file equal to what this writes.
"""

import csv
import io
from pathlib import Path

from phalanx.planner.published.cells import Row, UnusableError
from phalanx.planner.published.rows import read_rows, read_run
from phalanx.planner.published.runs import predict

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "benchmarks" / "published" / "runs_validate.csv"
TARGET = ROOT / "phalanx" / "explore" / "published.csv"


def chosen() -> str:
    """The chosen rows, as a CSV file."""
    by_source: dict[str, list[Row]] = {}
    for row in read_rows(SOURCE):
        if _is_usable(row):
            by_source.setdefault(predict(row).source, []).append(row)
    rows: dict[str, Row] = {}
    for found in by_source.values():
        by_size = sorted(found, key=lambda row: (int(row["n_gpus"]), float(row["params_B"] or 0)))
        rows |= {row["id"]: row for row in (by_size[0], by_size[-1])}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(next(iter(rows.values()))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return text.getvalue()


def _is_usable(row: Row) -> bool:
    try:
        run = read_run(row)
    except UnusableError:
        return False
    return run.complete and run.step_seconds is not None and not run.one_layer


if __name__ == "__main__":
    TARGET.write_text(chosen(), encoding="utf-8")
