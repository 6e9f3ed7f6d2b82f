"""Prove that a layout takes the same steps as one device: loss, gradients, norm and weights.

phalanx verify                                        a covering set of layouts: some minutes
phalanx verify --layout "dp=2 pp=2 tp=2 zero=3"       this one
phalanx verify --layout tp=2 --set model.vocab=97 --documents
phalanx verify --sample 100 --max-ranks 8 --seed 7    layouts drawn at random
phalanx verify --pairs                                every two features that go together
"""

import json
import math
import secrets
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from phalanx.cli.console import open_console
from phalanx.cli.runfile import assignment
from phalanx.core.errors import RefusedError, UsageError, unknown

if TYPE_CHECKING:
    from phalanx.oracle.cases import CaseSpec, Table
    from phalanx.oracle.pool import RankPool
    from phalanx.oracle.verify import Case, Outcome

SCHEMA = 1
DIFFERENT = 4
COMPLAINTS = 5  # shown of one layout; a wrong gradient soon makes everything wrong
SECTIONS = ("layout", "model", "recipe")
MASKS = ("none", "uneven", "holes")
COLUMNS = ("loss", "grad", "grad_norm", "weight")


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
    add(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a value of the model, recipe or layout, over everything else; may be repeated",
    )
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
    from phalanx.oracle.pool import RankPool

    if args.sample and args.seed is None:
        args.seed = secrets.randbelow(1_000_000)
    requested = [(spec, spec.case(args.steps)) for spec in _specs(args)]
    _refuse(args, requested)
    screen = _Screen(open_console(sys.stderr if args.json else sys.stdout))
    screen.start(_what(args, len(requested)))
    outcomes = []
    ranks = max(case.run.layout.ranks for _, case in requested)
    with RankPool(ranks) as pool:
        with screen.working(f"starting {ranks} ranks"):
            pool.start(ranks)
        for i, (spec, case) in enumerate(requested, 1):
            with screen.working(f"{i}/{len(requested)}  {_name(spec, case)}"):
                outcome = verdict(pool, case)
            screen.show(spec, outcome)
            outcomes.append(outcome)
    passed = all(outcome.passed for outcome in outcomes)
    screen.end(outcomes)
    if args.json:
        print(json.dumps(_document(args, [spec for spec, _ in requested], outcomes)))
    return 0 if passed else DIFFERENT


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


def _refuse(args: Namespace, requested: "Sequence[tuple[CaseSpec, Case]]") -> None:
    """Raise for the first layout that cannot be run, before any is."""
    from phalanx.oracle.verify import refuse_unprovable

    for spec, case in requested:
        layout = case.run.layout
        if layout.ranks > args.max_ranks:
            raise RefusedError(
                f"{spec.layout!r} needs {layout.ranks} ranks, and --max-ranks is "
                f"{args.max_ranks}; if this machine bears so many, raise it"
            )
        try:
            refuse_unprovable(case.run)
        except RefusedError as refusal:
            raise RefusedError(f"{spec.layout!r}: {refusal}") from None


def verdict(pool: "RankPool", case: "Case") -> "Outcome":
    """What the oracle finds; that a rank fails is a finding too."""
    from phalanx.oracle.pool import RankFailedError
    from phalanx.oracle.verify import Outcome, verify

    try:
        return verify(pool, case)
    except RankFailedError as failure:
        where, _, traceback = str(failure).partition(":")
        reason = traceback.strip().splitlines()[-1:]
        errors = dict.fromkeys(COLUMNS, math.inf)
        return Outcome(case, errors, [": ".join([where, *reason])], seconds=0.0)


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

    def show(self, spec: "CaseSpec", outcome: "Outcome") -> None:
        """One line for an outcome; what differs, and how to run it again, below a bad one."""
        numbers = "  ".join(f"{outcome.errors[column]:7.1e}" for column in COLUMNS)
        word = ("pass", "green") if outcome.passed else ("FAIL", "bold red")
        line = f"  {numbers}  {outcome.seconds:4.1f} s  {_name(spec, outcome.case)}"
        self.console.print(Text.assemble(word, line), soft_wrap=True)
        for complaint in outcome.complaints[:COMPLAINTS]:
            self.console.print(f"      {complaint}", soft_wrap=True)
        if len(outcome.complaints) > COMPLAINTS:
            self.console.print(f"      and {len(outcome.complaints) - COMPLAINTS} more")
        if not outcome.passed:
            self.console.print(f"      again: {_command(spec, outcome.case)}", soft_wrap=True)

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


def _name(spec: "CaseSpec", case: "Case") -> str:
    return f"{case.run.layout}{f' | {spec.unusual}' if spec.unusual else ''}"


def _command(spec: "CaseSpec", case: "Case") -> str:
    """The command line that runs this case alone."""
    words = ["phalanx", "verify", "--layout", str(case.run.layout)]
    for assigned in _assignments(spec):
        words += ["--set", assigned]
    words += ["--steps", str(case.steps)] if case.steps != 3 else []
    words += ["--masked", case.masked] if case.masked != "uneven" else []
    words += ["--documents"] if case.documents else []
    return shlex.join(words)


def _assignments(spec: "CaseSpec") -> Iterator[str]:
    for section, values in spec.changes().items():
        for key, value in values.items():
            if section != "layout":
                yield f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"


def _document(
    args: Namespace, specs: "Sequence[CaseSpec]", outcomes: "Sequence[Outcome]"
) -> dict[str, Any]:
    """What scripts read; an error that is not finite is null."""
    return {
        "schema": SCHEMA,
        "passed": all(outcome.passed for outcome in outcomes),
        "seed": args.seed,
        "cases": [
            {
                "layout": str(outcome.case.run.layout),
                "passed": outcome.passed,
                "max_rel_error": {
                    name: error if math.isfinite(error) else None
                    for name, error in outcome.errors.items()
                },
                "seconds": outcome.seconds,
                "ranks": outcome.case.run.layout.ranks,
                "steps": outcome.case.steps,
                "masked": outcome.case.masked,
                "documents": outcome.case.documents,
                "set": list(_assignments(spec)),
                "complaints": outcome.complaints,
                "command": _command(spec, outcome.case),
            }
            for spec, outcome in zip(specs, outcomes, strict=True)
        ],
    }
