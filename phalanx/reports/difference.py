"""Two runs: what changed from the first to the second, term by term, and which keys differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.core.html import html_table
from phalanx.core.units import show_seconds
from phalanx.reports.report import SCHEMA, RunReport
from phalanx.reports.term import ReportTerm, signed


class TermChange(NamedTuple):
    """One term in both runs, in seconds of a step.

    Attributes:
        name: of the term.
        first: seconds in the first run; 0 where it has no such term.
        second: in the second.
        planned: how much longer the plan has it in the second; None where one has no plan.
    """

    name: str
    first: float
    second: float
    planned: float | None

    @property
    def change(self) -> float:
        """How much longer it is in the second."""
        return self.second - self.first

    def to_dict(self) -> dict[str, Any]:
        """One entry of `terms`, as `--json` prints it."""
        return {
            "name": self.name,
            "measured_seconds": self.second,
            "first_seconds": self.first,
            "difference_seconds": self.change,
            "planned_difference_seconds": self.planned,
        }


class KeyChange(NamedTuple):
    """A key of the run file that is another in the second run; None where it is missing."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class ReportDifference:
    """What changed between two runs.

    Attributes:
        first: the run that is compared with.
        second: the run that is asked about.
    """

    first: RunReport
    second: RunReport

    @property
    def terms(self) -> tuple[TermChange, ...]:
        """Every term of either, largest change first; they add up to the change of the step."""
        changes = _changes(self.first.terms, self.second.terms)
        return tuple(sorted(changes, key=lambda change: -abs(change.change)))

    @property
    def keys(self) -> tuple[KeyChange, ...]:
        """Keys of the run file that differ."""
        first, second = (dict(_flat(r.record.settings)) for r in (self.first, self.second))
        return tuple(
            KeyChange(key, first.get(key), second.get(key))
            for key in sorted(first.keys() | second.keys())
            if first.get(key) != second.get(key)
        )

    @property
    def seconds(self) -> float | None:
        """How much longer a step of the second is; None where one has none."""
        if self.first.step_seconds is None or self.second.step_seconds is None:
            return None
        return self.second.step_seconds - self.first.step_seconds

    @property
    def planned(self) -> float | None:
        """How much longer the plan has a step of the second; None where one has no plan."""
        if self.first.plan is None or self.second.plan is None:
            return None
        return self.second.plan.estimate.step_seconds - self.first.plan.estimate.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx report RUN RUN2 --json` prints."""
        return {
            "schema": SCHEMA,
            "first": self.first.to_dict(),
            "second": self.second.to_dict(),
            "difference_seconds": self.seconds,
            "terms": [change.to_dict() for change in self.terms],
            "keys": [change._asdict() for change in self.keys],
        }

    def _repr_html_(self) -> str:
        """The changes as a table, for a notebook."""
        rows = [
            (c.name, show_seconds(c.first), show_seconds(c.second), signed(c.change))
            for c in self.terms
        ]
        headers = ("term", self.first.name, self.second.name, "change")
        return html_table(f"{self.first.name} and {self.second.name}", rows, headers)


def _changes(first: tuple[ReportTerm, ...], second: tuple[ReportTerm, ...]) -> Iterator[TermChange]:
    before, after = ({term.name: term for term in terms} for terms in (first, second))
    both_planned = all(any(t.planned is not None for t in terms) for terms in (first, second))
    for name in dict.fromkeys((*before, *after)):
        a, b = before.get(name), after.get(name)
        planned = ((b and b.planned) or 0.0) - ((a and a.planned) or 0.0)
        yield TermChange(
            name,
            (a and a.measured) or 0.0,
            (b and b.measured) or 0.0,
            planned if both_planned else None,
        )


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
