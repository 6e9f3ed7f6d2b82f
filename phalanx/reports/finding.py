"""What a doctor says: a cause, whether it is seen, by what numbers, and what to change."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.core.html import html_table
from phalanx.core.units import show_share

SCHEMA = 1


class Finding(NamedTuple):
    """One cause of lost time, or one property of a machine.

    Attributes:
        cause: what it is about.
        seen: whether it is so here.
        evidence: in numbers.
        change: what to set or do; empty where there is nothing to do.
        expected_gain: share of the time of a step, or of the run, that this should bring; None
            where nobody can say.
    """

    cause: str
    seen: bool
    evidence: str
    change: str = ""
    expected_gain: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """One entry of `findings`, as `--json` prints it."""
        return self._asdict()


@dataclass(frozen=True)
class Findings:
    """What `phalanx.doctor` gives.

    Example:
        >>> import phalanx
        >>> [found.cause for found in phalanx.doctor("tests/reports/recorded").findings][:2]
        ['data', 'kernels and batch size']

    Attributes:
        about: a machine, or a run.
        findings: in the order in which to look at them.
        notes: what a reader should know.
    """

    about: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def seen(self) -> tuple[Finding, ...]:
        """Those that are so here."""
        return tuple(found for found in self.findings if found.seen)

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx doctor --json` prints."""
        return {
            "schema": SCHEMA,
            "name": self.about,
            "findings": [found.to_dict() for found in self.findings],
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        """The findings as a table, for a notebook."""
        return html_table(self.about, rows(self.findings), HEADERS)


HEADERS = ("cause", "seen", "evidence", "change", "gain")


def rows(findings: Iterable[Finding]) -> list[tuple[str, str, str, str, str]]:
    """The findings as texts, one row each.

    Args:
        findings: in order.
    """
    return [
        (
            found.cause,
            "yes" if found.seen else "no",
            found.evidence,
            found.change or "-",
            "-" if found.expected_gain is None else show_share(found.expected_gain),
        )
        for found in findings
    ]
