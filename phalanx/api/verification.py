"""The oracle from Python: `phalanx.verify` holds layouts against one device."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.api.names import LayoutLike, ModelLike, layout_of, sizes_of
from phalanx.core.errors import (
    LostMessageError,
    RefusedError,
    UsageError,
    require_type,
    require_whole,
)
from phalanx.core.html import html_table
from phalanx.core.layout import Layout
from phalanx.data.synthetic import Masked
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankFailedError, RankPool
from phalanx.oracle.verify import Case, Outcome, refuse_unprovable
from phalanx.oracle.verify import verify as verify_case

SCHEMA = 1
QUANTITIES = ("loss", "grad", "grad_norm", "weight")


@dataclass(frozen=True)
class Verdict:
    """What the oracle found about some layouts.

    Attributes:
        specs: what was asked, case by case.
        outcomes: what came of it, in the same order.
        seed: of the sample that the cases are; None where they are none.

    Example:
        >>> import phalanx
        >>> phalanx.verify("tp=2", steps=1).passed
        True
    """

    specs: tuple[CaseSpec, ...]
    outcomes: tuple[Outcome, ...]
    seed: int | None = None

    @property
    def passed(self) -> bool:
        """Whether every layout takes the update of one device."""
        return all(outcome.passed for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx verify --json` prints; an infinite error is None."""
        pairs = zip(self.specs, self.outcomes, strict=True)
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "seed": self.seed,
            "cases": [_record(spec, outcome) for spec, outcome in pairs],
        }

    def _repr_html_(self) -> str:
        """The cases as a table, for a notebook."""
        rows = [
            (
                outcome.case.run.layout,
                "pass" if outcome.passed else "; ".join(outcome.complaints[:1]),
                *(f"{outcome.errors[name]:.1e}" for name in QUANTITIES),
            )
            for outcome in self.outcomes
        ]
        word = "all the same as one device" if self.passed else "not the same as one device"
        return html_table(word, rows, ("layout", "verdict", *QUANTITIES))


def verify(
    layout: LayoutLike | Sequence[LayoutLike],
    *,
    steps: int = 3,
    masked: Masked = "uneven",
    documents: bool = False,
    model: ModelLike | None = None,
    recipe: Mapping[str, object] | None = None,
) -> Verdict:
    """Take a few steps under each layout and on one device, and compare them.

    Loss, every gradient, the global gradient norm and every weight, in fp64 unless the layout
    names a precision. Pass means relative errors of at most 1e-10.

    Args:
        layout: a line, a table of keys, a `Layout`, or several of them. One process is started
            for each rank of the largest, on this machine's CPU.
        steps: optimizer steps.
        masked: which targets do not count: none, unevenly many, or "holes".
        documents: pack several documents into each sequence.
        model: keys of the table [model] that differ from the oracle's small Llama; or a whole
            model, by name or as a `ModelShape`.
        recipe: keys of the table [recipe] that differ.

    Returns:
        The verdict; `passed` says whether all layouts are right.

    Raises:
        UsageError: an unknown key, or a value of the wrong kind.
        RefusedError: the layout cannot run such a model; the message says what can.
        PhalanxError: torch is missing.

    Example:
        >>> import phalanx
        >>> verdict = phalanx.verify({"pp": 2}, steps=1, model={"layers": 2})
        >>> verdict.outcomes[0].errors["grad"] < 1e-10
        True
    """
    require_whole("steps", steps)
    if steps < 1:
        raise UsageError(f"steps is {steps}; it is at least 1")
    require_type("layout", layout, (str, Mapping, Layout, Sequence), "one layout, or several")
    layouts = [layout] if isinstance(layout, str | Mapping | Layout) else list(layout)
    if not layouts:
        raise UsageError("layout is empty; there is at least one layout to verify")
    require_type("recipe", recipe or {}, Mapping, "a table of keys")
    tables = {"model": sizes_of(model or {}), "recipe": recipe or {}}
    changes = {name: dict(keys) for name, keys in tables.items() if keys}
    specs = [
        CaseSpec(str(layout_of(each)), masked=masked, documents=documents, tables=changes)
        for each in layouts
    ]
    cases = [spec.case(steps) for spec in specs]
    for case in cases:
        refuse_unprovable(case.run)
    return compare_all(specs, cases)


class Watcher(Protocol):
    """Who looks on while cases are compared."""

    def working(self, what: str) -> AbstractContextManager[object]:
        """Surrounds each piece of work."""

    def say(self, event: str) -> None:
        """Something worth a line happened beside."""

    def show(self, spec: CaseSpec, outcome: Outcome) -> None:
        """An outcome is there.

        Args:
            spec: the case in words.
            outcome: what the oracle found.
        """


class Unwatched:
    """Nobody looks on."""

    def working(self, what: str) -> AbstractContextManager[object]:
        """Nothing is shown."""
        return nullcontext()

    def say(self, event: str) -> None:
        """Nothing is shown."""

    def show(self, spec: CaseSpec, outcome: Outcome) -> None:
        """Nothing is shown.

        Args:
            spec: the case in words.
            outcome: what the oracle found.
        """


def compare_all(
    specs: Sequence[CaseSpec],
    cases: Sequence[Case],
    seed: int | None = None,
    watcher: Watcher | None = None,
) -> Verdict:
    """Hold every case against one device, on one pool of processes.

    Args:
        specs: the cases in words.
        cases: the same cases; at least one.
        seed: of their sample.
        watcher: told of every outcome as it comes.
    """
    watching = watcher or Unwatched()
    ranks = max(case.run.layout.ranks for case in cases)
    outcomes = []
    with RankPool(ranks, watching.say) as pool:
        with watching.working(f"starting {ranks} ranks"):
            pool.start(ranks)
        for i, (spec, case) in enumerate(zip(specs, cases, strict=True), 1):
            with watching.working(f"{i}/{len(cases)}  {name_of(spec, case)}"):
                outcome = outcome_of(pool, case)
            watching.show(spec, outcome)
            outcomes.append(outcome)
    return Verdict(tuple(specs), tuple(outcomes), seed)


def outcome_of(pool: RankPool, case: Case) -> Outcome:
    """What the oracle finds; that a rank fails, or waits in vain, is a finding too.

    Args:
        pool: with at least as many ranks as the layout.
        case: what to compare.

    Raises:
        RefusedError: the layout cannot run this model.
    """
    try:
        return verify_case(pool, case)
    except LostMessageError as lost:
        return Outcome(case, dict.fromkeys(QUANTITIES, math.inf), [str(lost)], seconds=0.0)
    except RankFailedError as failure:
        where, _, traceback = str(failure).partition(":")
        reason = traceback.strip().splitlines()[-1:]
        errors = dict.fromkeys(QUANTITIES, math.inf)
        return Outcome(case, errors, [": ".join([where, *reason])], seconds=0.0)


def refuse_too_large(specs: Sequence[CaseSpec], cases: Sequence[Case], max_ranks: int) -> None:
    """Raise for the first layout that cannot be run here, before any is.

    Args:
        specs: the cases in words.
        cases: the same cases.
        max_ranks: processes that this machine may be asked to bear.

    Raises:
        RefusedError: with the layout, and what works.
    """
    for spec, case in zip(specs, cases, strict=True):
        ranks = case.run.layout.ranks
        if ranks > max_ranks:
            raise RefusedError(
                f"{spec.layout!r} needs {ranks} ranks, and --max-ranks is {max_ranks}; "
                "if this machine bears so many, raise it"
            )
        try:
            refuse_unprovable(case.run)
        except RefusedError as refusal:
            raise RefusedError(f"{spec.layout!r}: {refusal}") from None


def name_of(spec: CaseSpec, case: Case) -> str:
    """A case in one line: its layout, and what else is unusual.

    Args:
        spec: the case in words.
        case: the same case.
    """
    return f"{case.run.layout}{f' | {spec.unusual}' if spec.unusual else ''}"


def command_of(spec: CaseSpec, case: Case) -> str:
    """The command line that runs this case alone.

    Args:
        spec: the case in words.
        case: the same case.
    """
    words = ["phalanx", "verify", "--layout", str(case.run.layout)]
    for assigned in _assignments(spec):
        words += ["--set", assigned]
    words += ["--steps", str(case.steps)] if case.steps != 3 else []
    words += ["--masked", case.masked] if case.masked != "uneven" else []
    words += ["--documents"] if case.documents else []
    return shlex.join(words)


def _assignments(spec: CaseSpec) -> Iterator[str]:
    for section, values in spec.changes().items():
        for key, value in values.items():
            if section != "layout":
                yield f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"


def _record(spec: CaseSpec, outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    return {
        "layout": str(case.run.layout),
        "passed": outcome.passed,
        "max_rel_error": {
            name: error if math.isfinite(error) else None for name, error in outcome.errors.items()
        },
        "seconds": outcome.seconds,
        "ranks": case.run.layout.ranks,
        "steps": case.steps,
        "masked": case.masked,
        "documents": case.documents,
        "set": list(_assignments(spec)),
        "complaints": outcome.complaints,
        "command": command_of(spec, case),
    }
