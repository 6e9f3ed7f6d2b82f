"""Steps that the planner gives for this machine, once it is calibrated, beside measured ones.

Ten layouts of a small model on one rank and on two, with real arithmetic. Layouts take turns, and
so does the calibration, half of it before and half after: what the machine does meanwhile falls on
both alike. Neither the model nor its sequences are those that the calibration looked at.

Where other programs take cores away, steps of one rank are timed by the processor's own clock, and
those of two by their best samples: the table says how often that was.

Bars: each step within 15 %, 8 % in the mean, and the order as measured but for near ties.

OMP_NUM_THREADS=1 python benchmarks/calibrated.py [--rounds 4] [--quick] [--json]
"""

import json
import math
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from calibrated_ranks import BATCH, SEQ, calibrate_here, measure_rank, run_of
from rich.console import Console
from rich.table import Table

from phalanx.api.calibrations import read_calibration
from phalanx.planner.estimate import estimate
from phalanx.trainer.run.launch import launch

TIE = 0.05  # measured steps that are nearer than this may change places


class Row(NamedTuple):
    """One layout.

    Attributes:
        layout: as a line.
        measured: seconds of a step.
        planned: by the planner.
        disturbed: share of its samples in which other programs took a core away.
    """

    layout: str
    measured: float
    planned: float
    disturbed: float

    @property
    def error(self) -> float:
        """Planned over measured, less 1."""
        return self.planned / self.measured - 1


def planned(line: str, files: Sequence[Path]) -> float:
    """Seconds of a step by the planner: the geometric mean over calibrations."""
    run, each = run_of(line), []
    for path in files:
        cluster = read_calibration(path).cluster
        each.append(estimate(run.model, cluster, run.layout, SEQ, BATCH).step_seconds)
    return math.exp(statistics.mean(math.log(seconds) for seconds in each))


def compare(args: Namespace, folder: Path) -> list[Row]:
    """Calibrate, measure, calibrate again; and plan."""
    rows = []
    for ranks in (1, 2):
        files = [folder / f"{ranks}-{name}.toml" for name in ("before", "after")]
        launch(calibrate_here, (files[0], args.quick), ranks)
        launch(measure_rank, (folder, args.rounds, args.seconds), ranks)
        launch(calibrate_here, (files[1], args.quick), ranks)
        found = json.loads((folder / f"measured-{ranks}.json").read_text())
        for line, (seconds, disturbed) in found.items():
            rows.append(Row(line, seconds, planned(line, files), disturbed))
    return rows


def misplaced(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Pairs that the planner puts in another order than they were measured in, but for ties."""
    found = []
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            apart = math.log(one.measured / other.measured)
            if abs(apart) > TIE and apart * math.log(one.planned / other.planned) < 0:
                found.append((one.layout, other.layout))
    return found


def main() -> None:
    """Print a table, or one JSON document."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="turns of every layout")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="rough calibrations")
    parser.add_argument("--keep", type=Path, help="folder for the calibrations")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = compare(args, args.keep or Path(scratch))
    errors = [abs(row.error) for row in rows]
    swapped = misplaced(rows)
    if args.json:
        table = [{**row._asdict(), "error": row.error} for row in rows]
        print(json.dumps({"schema": 1, "rows": table, "misplaced": swapped}, indent=2))
        return
    table = Table(title="steps of one rank and of two", title_justify="left")
    for column in ("layout", "measured", "planned", "error", "disturbed"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        shown = (f"{row.measured * 1e3:.1f} ms", f"{row.planned * 1e3:.1f} ms")
        table.add_row(row.layout, *shown, f"{row.error:+.1%}", f"{row.disturbed:.0%}")
    Console(width=100).print(table)
    print(f"mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}")
    print(f"pairs in another order: {swapped or 'none'}")


if __name__ == "__main__":
    main()
