"""One part of the time of a run, measured and planned: what a waterfall is made of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.units import show_seconds

NOTHING = 1e-9  # seconds; a difference below it is that of two roundings


@dataclass(frozen=True, kw_only=True)
class ReportTerm:
    """A named part of a step, or of the wall clock of a run.

    Attributes:
        name: what the time went to.
        measured: seconds; None where nothing was measured that could say.
        planned: seconds; None where there is no plan, or it says nothing of this.
        share: of the measured whole.
        parts: of the planned seconds, where the measured cannot be told apart.
        why: what is in it, in a few words.
    """

    name: str
    measured: float | None
    planned: float | None = None
    share: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """One entry of `terms`, as `--json` prints it."""
        return {
            "name": self.name,
            "measured_seconds": self.measured,
            "planned_seconds": self.planned,
            "share": self.share,
            "planned_parts": dict(self.parts),
            "why": self.why,
        }


def total(terms: Iterable[ReportTerm]) -> float:
    """Measured seconds of all of them."""
    return sum(term.measured for term in terms if term.measured is not None)


def find(terms: Iterable[ReportTerm], name: str) -> ReportTerm | None:
    """The term of a name.

    Args:
        terms: to look among.
        name: of the one.
    """
    return next((term for term in terms if term.name == name), None)


def measured(terms: Iterable[ReportTerm], *names: str) -> float:
    """Measured seconds of the terms of these names, or of those whose name begins so.

    Args:
        terms: to look among.
        names: whole, or how they begin.
    """
    return sum(term.measured or 0.0 for term in terms if term.name.startswith(names))


def signed(seconds: float) -> str:
    """A difference of two times, in words.

    Example:
        >>> signed(0.003), signed(-1.2), signed(1e-21)
        ('+3 ms', '-1.2 s', '0 s')
    """
    shown = show_seconds(0.0 if abs(seconds) < NOTHING else seconds)
    return f"+{shown}" if seconds >= NOTHING else shown
