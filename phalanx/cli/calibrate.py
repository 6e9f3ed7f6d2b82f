"""Measure this machine: the file is a cluster for every planning command.

phalanx calibrate                        all GPUs, or one rank on the CPU; writes calibrated.toml
phalanx calibrate --ranks 2 -o two.toml  two ranks that compute at once, as training would
phalanx estimate my-model.toml two.toml --layout tp=2 --batch 8 --seq 512

It takes a few minutes, in which the machine should do nothing else. What was there before stays
until everything is measured. Under torchrun or srun every rank takes part.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.api.calibrations import DEFAULT, Calibration, read_calibration, require_writable
from phalanx.cli.stream import say
from phalanx.core.errors import PhalanxError, UsageError
from phalanx.core.units import show_seconds

if TYPE_CHECKING:
    from phalanx.trainer.run.worker import Worker

BUSY = 0.2  # share of samples above which the machine is told to have been busy
MOST_RANKS = 1024


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes; the help text is the documentation."""
    add = parser.add_argument
    add("-o", "--output", type=Path, default=DEFAULT, metavar="FILE.toml", help="what is written")
    add("--ranks", type=int, help="local ranks that are measured at once (one for each GPU, or 1)")
    add("--quick", action="store_true", help="seconds instead of minutes: the numbers are rough")
    add("--quiet", action="store_true", help="show no progress")
    add("--json", action="store_true", help="print what was measured as one JSON document")


def run(args: Namespace) -> int:
    """Measure, write the file, and say what is in it."""
    from phalanx.trainer.run.launch import count_gpus, launch, require_files, require_torch
    from phalanx.trainer.run.started import started_by

    require_torch()
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        raise UsageError(f"--ranks is {args.ranks}; it is 1 to {MOST_RANKS:,}")
    require_writable(args.output)
    path = args.output.absolute()
    job = (path, args.quick, args.quiet)
    started = started_by()
    begun = time.perf_counter()
    if started is None:
        ranks = args.ranks or max(count_gpus(), 1)
        require_files(ranks)
        code = launch(calibrate_one_rank, job, ranks)
    else:
        if args.ranks is not None and args.ranks != started.ranks:
            raise UsageError(f"--ranks is {args.ranks}, and {started.launcher} started otherwise")
        code = _as_started(job, started)
        if started.rank:
            return code
    if code == 0:
        _show(args, read_calibration(path), time.perf_counter() - begun)
    return code


def calibrate_one_rank(worker: "Worker", path: Path, quick: bool, quiet: bool) -> int:
    """What each rank does; rank 0 says what comes next.

    Args:
        worker: this process, joined with the others.
        path: of the file.
        quick: less of everything.
        quiet: say nothing.

    Raises:
        PhalanxError: the file cannot be written.
    """
    from phalanx.api.calibrations import calibrate_rank

    speaks = worker.rank == 0 and not quiet
    tell = partial(_tell, time.perf_counter()) if speaks else _silent
    return calibrate_rank(worker, path, tell, quick=quick)


def _tell(begun: float, what: str) -> None:
    say(f"{time.perf_counter() - begun:5.0f} s  {what}", sys.stderr)


def _silent(what: str) -> None:
    """Nothing is shown."""


def _as_started(job: tuple[Path, bool, bool], started: object) -> int:
    """Be one rank of those that torchrun or srun started."""
    from phalanx.trainer.run.started import Started
    from phalanx.trainer.run.worker import exit_code, leave_a_note, work_here

    assert isinstance(started, Started)
    started.tell_torch()
    try:
        return work_here(calibrate_one_rank, job)
    except PhalanxError as error:
        if leave_a_note(error):
            raise
        return exit_code(error)


def _show(args: Namespace, found: Calibration, seconds: float) -> None:
    if args.json:
        print(json.dumps(found.to_dict()))
        return
    for line in lines_of(found):
        print(line)
    print(f"written: {args.output}, in {show_seconds(seconds)}")
    print(f"try:     phalanx estimate MODEL {args.output} --layout ... --batch ... --seq ...")


def lines_of(found: Calibration) -> list[str]:
    """What was measured, in lines.

    Args:
        found: the calibration.
    """
    tables = found.tables
    rates, measured = tables["sustained"], tables["measured"]
    peaks = ", ".join(f"{name} {1e3 * rate:,.4g}" for name, rate in tables["peak_tflops"].items())
    lines = [
        f"{tables['count']} ranks of {measured['threads_per_rank']} threads, {tables['vendor']}",
        f"products    {peaks} GFLOP/s a rank; half of it at an inner length of {rates['depth']:g}",
        f"attention   {rates['attention']:.1%} of that",
        f"memory      {tables['hbm_gb_per_s']:g} GB/s; passes of a step reach "
        f"{rates['memory']:.1%} of it",
        f"launch      {rates['launch_us']:g} us a kernel; {rates.get('step_ms', 0.0):g} ms a step",
        f"disk        {measured['disk_gb_per_s']:g} GB/s",
    ]
    lines += [
        f"{each['name']:14} of {each['ranks']}: {each['latency_us']:g} us + "
        f"{each['gb_per_s']:g} GB/s"
        for each in tables.get("collectives", ())
    ]
    if steps := measured.get("steps"):
        errors = [step["planned_seconds"] / step["seconds"] - 1 for step in steps]
        mean = sum(abs(error) for error in errors) / len(errors)
        worst = max(errors, key=abs)
        lines.append(f"the planner gives the {len(steps)} measured steps to {mean:.1%} in the mean")
        lines[-1] += f", {worst:+.1%} at worst"
    if measured["disturbed"] > BUSY:
        share = f"{measured['disturbed']:.0%}"
        lines.append(
            f"other programs took cores away in {share} of the samples: arithmetic is timed by the "
            "processor's own clock, messages by their best samples; do it again when it is quiet"
        )
    return lines
