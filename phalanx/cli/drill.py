"""Injure a run on this machine, and hold each result against the run that was left alone.

phalanx drill RUN.toml                          every kind of fault: some minutes
phalanx drill RUN.toml --faults kill,hang       these kinds: kill, random, crash, hang, preempt,
                                                corrupt
phalanx drill RUN.toml --faults random --kills 300 --steps 100 --seed 7 --log kills.jsonl
                                                several kills for each run; started again with
                                                the same log it goes on

The run keeps its layout (four ranks at most), model, data and recipe; it is some steps long, saves
and validates in between, and is written to a temporary folder. Equal means: every parameter, the
optimizer, scales, biases and place in the data of the last checkpoint, the bits of every loss, and
every step once. Exit code 4: something was not equal.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from phalanx.api.runfile import load_run
from phalanx.cli.console import open_console
from phalanx.cli.sets import declare_sets
from phalanx.core.errors import UsageError

if TYPE_CHECKING:
    from phalanx.api.drills import DrillReport
    from phalanx.drills.campaign import DrillCase

DIFFERENT = 4


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("run_file", type=Path, metavar="RUN.toml", help="the run to injure")
    add("--faults", default="", metavar="KIND,...", help="kinds of faults (default: all)")
    add("--kills", type=int, default=3, metavar="N", help="kills at random instants (default 3)")
    add("--steps", type=int, default=12, metavar="N", help="of the run, at most (default 12)")
    add("--seed", type=int, default=0, help="of steps, ranks and instants (default 0)")
    add("--log", type=Path, metavar="FILE", help="keeps cases; with it a drill can go on later")
    add("--layout", help="how to cut a step, instead of the file's")
    declare_sets(parser)
    add("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Carry the drill out; show each case as it ends."""
    if args.kills < 0:
        raise UsageError(f"--kills is {args.kills}; it is at least 0")
    from phalanx.api.drills import DrillLog, drill

    loaded = load_run(args.run_file, layout=args.layout, sets=args.sets)
    screen = _DrillScreen(open_console(sys.stderr if args.json else sys.stdout))
    screen.start(str(loaded.layout), args.seed)
    report = drill(
        loaded,
        faults=[kind.strip() for kind in args.faults.split(",") if kind.strip()],
        kills=args.kills,
        steps=args.steps,
        seed=args.seed,
        log=DrillLog(args.log, screen.show),
    )
    screen.end(report)
    if args.json:
        print(json.dumps(report.to_dict()))
    return 0 if report.passed else DIFFERENT


class _DrillScreen:
    """A line for each case."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, layout: str, seed: int) -> None:
        """Say what is injured, and name the columns."""
        self._console.print(f"injuring {layout}, seed {seed}; first the undisturbed run")
        head = f"      {'noticed':>8} {'back':>8} {'twice':>6}  {'fault':<14} rank  where"
        self._console.print(head, style="bold", soft_wrap=True)

    def show(self, case: "DrillCase") -> None:
        """One line for a case; what differs below it."""
        if not case.happened:
            word = ("  --", "dim")
        else:
            word = ("same", "green") if case.equal else ("DIFF", "bold red")
        rank = "all" if case.rank is None else str(case.rank)
        times = f"{_seconds(case.noticed_seconds):>8} {_seconds(case.back_seconds):>8}"
        line = f"  {times} {case.steps_repeated:>6}  {case.fault:<14} {rank:>4}  {case.where}"
        self._console.print(Text.assemble(word, line), soft_wrap=True)
        for difference in case.differences:
            self._console.print(f"      {difference}", soft_wrap=True)

    def end(self, report: "DrillReport") -> None:
        """The verdict."""
        if report.unmet:
            self._console.print(f"{len(report.unmet)} faults (--) were never met", style="dim")
        bad = sum(not case.equal for case in report.cases)
        if bad:
            text = f"{bad} of {len(report.cases)} differ from the undisturbed run"
            self._console.print(text, style="bold red")
        else:
            text = f"{len(report.cases)} faults, and each result the same as the undisturbed run's"
            self._console.print(text, style="bold green")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
