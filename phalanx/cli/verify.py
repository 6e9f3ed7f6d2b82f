"""Prove that a layout takes the same steps as one device: loss, gradients, norm and weights.

phalanx verify                                        a covering set of layouts: some minutes
phalanx verify --layout "dp=2 pp=2 tp=2 zero=3"       this one
phalanx verify --layout tp=2 --set model.vocab=97 --documents
phalanx verify --sample 100 --max-ranks 8 --seed 7    layouts drawn at random
phalanx verify --pairs                                every two features that go together
"""

import json
import secrets
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from phalanx.api.runfile import assignment
from phalanx.cli.console import open_console
from phalanx.cli.sets import declare_sets
from phalanx.core.errors import UsageError, unknown

if TYPE_CHECKING:
    from phalanx.oracle.cases import CaseSpec, Table
    from phalanx.oracle.verify import Outcome

DIFFERENT = 4
COMPLAINTS = 5  # shown of one layout; a wrong gradient soon makes everything wrong
SECTIONS = ("layout", "model", "recipe")
MASKS = ("none", "uneven", "holes")


def arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add(
        "--layout",
        dest="layouts",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="a layout to verify, in one line; may be repeated",
    )
    add("--sample", type=int, metavar="K", help="verify K layouts and models drawn at random")
    add("--pairs", action="store_true", help="verify every two features that go together")
    add("--max-ranks", type=int, default=8, metavar="R", help="the largest layout (default 8)")
    add("--seed", type=int, help="of the sample; printed where it is not given")
    declare_sets(parser, "a value of the model, recipe or layout")
    add("--steps", type=int, default=3, metavar="N", help="optimizer steps to compare (default 3)")
    add(
        "--masked",
        choices=MASKS,
        help="targets that do not count: none; unevenly many per sequence, the default; or holes, "
        "and all of half the sequences",
    )
    add("--documents", action="store_true", help="pack several documents into each sequence")
    add("--json", action="store_true", help="print one JSON document")


def run(args: Namespace) -> int:
    """Compare every layout with one device; say what differs."""
    _require_sensible(args)
    from phalanx.api.verification import compare_all, refuse_too_large

    if args.sample and args.seed is None:
        args.seed = secrets.randbelow(1_000_000)
    specs = _specs(args)
    cases = [spec.case(args.steps) for spec in specs]
    refuse_too_large(specs, cases, args.max_ranks)
    screen = _Screen(open_console(sys.stderr if args.json else sys.stdout))
    screen.start(_what(args, len(specs)))
    verdict = compare_all(specs, cases, args.seed, screen)
    screen.end(verdict.outcomes)
    if args.json:
        print(json.dumps(verdict.to_dict()))
    return 0 if verdict.passed else DIFFERENT


def _require_sensible(args: Namespace) -> None:
    if sum((bool(args.layouts), args.sample is not None, args.pairs)) > 1:
        raise UsageError("--layout, --sample and --pairs are several requests; make one at a time")
    if args.seed is not None and args.sample is None:
        raise UsageError("--seed is of a sample; add --sample 12")
    for option, value in (("sample", args.sample), ("max-ranks", args.max_ranks)):
        if value is not None and value < 1:
            raise UsageError(f"--{option} is {value}; it is at least 1")
    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}; it is at least 1")


def _specs(args: Namespace) -> "list[CaseSpec]":
    """What is requested: the layouts given, a sample, or the covering set."""
    from phalanx.oracle.cases import CaseSpec, covering_set, merged, sample
    from phalanx.oracle.compose import together

    changes = _changes(args.sets)
    if args.sample is not None:
        specs = sample(args.sample, args.max_ranks, args.seed, changes)
    elif args.layouts:
        specs = [CaseSpec(line, tables=changes) for line in args.layouts]
    else:
        requested = together(args.max_ranks) if args.pairs else covering_set(args.max_ranks)
        specs = [replace(q, tables=merged([q.tables, changes])) for q in requested]
    return [
        replace(q, masked=args.masked or q.masked, documents=args.documents or q.documents)
        for q in specs
    ]


def _changes(sets: Sequence[str]) -> "Table":
    changes: Table = {}
    for text in sets:
        section, key, value = assignment(text)
        if section in ("data", "cluster"):
            raise UsageError(
                f"--set {text} changes nothing here: the oracle makes up its batches; "
                "see --masked and --documents"
            )
        if section not in SECTIONS:
            raise unknown("table", section, SECTIONS)
        if (section, key) == ("model", "name"):
            raise UsageError(
                "the oracle compares small models; set model.layers, model.hidden, ..."
            )
        changes.setdefault(section, {})[key] = value
    return changes


def _what(args: Namespace, count: int) -> str:
    steps = f"{args.steps} step{'s' if args.steps > 1 else ''} each against one device"
    if args.sample is None:
        return f"{count} layout{'s' if count > 1 else ''}, {steps}"
    how = f"--sample {args.sample} --max-ranks {args.max_ranks} --seed {args.seed}"
    return f"{count} layouts drawn by {how}, {steps}"


class _Screen:
    """Shows what is being compared, and a line for each outcome."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, what: str) -> None:
        """Say what is requested, and name the columns of the outcomes."""
        self.console.print(what)
        headers = ("loss", "grad", "norm", "weight")
        columns = "  ".join(f"{header:7}" for header in headers)
        self.console.print(f"      {columns}  {'time':>6}  layout", style="bold", soft_wrap=True)

    def working(self, what: str) -> AbstractContextManager[object]:
        """On a terminal, a live line while the ranks work."""
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            return nullcontext()
        return self.console.status(what)

    def say(self, event: str) -> None:
        """One line for what happens beside."""
        self.console.print(event, soft_wrap=True)

    def show(self, spec: "CaseSpec", outcome: "Outcome") -> None:
        """One line for an outcome; what differs, and how to run it again, below a bad one."""
        from phalanx.api.verification import QUANTITIES, command_of, name_of

        numbers = "  ".join(f"{outcome.errors[column]:7.1e}" for column in QUANTITIES)
        word = ("pass", "green") if outcome.passed else ("FAIL", "bold red")
        line = f"  {numbers}  {outcome.seconds:4.1f} s  {name_of(spec, outcome.case)}"
        self.console.print(Text.assemble(word, line), soft_wrap=True)
        for complaint in outcome.complaints[:COMPLAINTS]:
            self.console.print(f"      {complaint}", soft_wrap=True)
        if len(outcome.complaints) > COMPLAINTS:
            self.console.print(f"      and {len(outcome.complaints) - COMPLAINTS} more")
        if not outcome.passed:
            self.console.print(f"      again: {command_of(spec, outcome.case)}", soft_wrap=True)

    def end(self, outcomes: "Sequence[Outcome]") -> None:
        """The verdict."""
        bad = sum(not outcome.passed for outcome in outcomes)
        seconds = sum(outcome.seconds for outcome in outcomes)
        if bad:
            self.console.print(f"{bad} of {len(outcomes)} differ from one device", style="bold red")
        else:
            self.console.print(
                f"all the same as one device, in {seconds:.0f} s", style="bold green"
            )
