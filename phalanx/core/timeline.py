"""What happened when, on which rank: planned and measured timelines are the same value."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Category = Literal["compute", "communicate", "wait", "optimizer", "data"]


class Span(NamedTuple):
    """One stretch of time on one rank, in seconds from the start of the timeline."""

    rank: int
    label: str
    category: Category
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks, planned or measured."""

    source: Literal["planned", "measured"]
    spans: tuple[Span, ...]

    def seconds_by_category(self) -> dict[str, float]:
        """Total seconds of each category, summed over ranks."""
        totals: dict[str, float] = {}
        for span in self.spans:
            totals[span.category] = totals.get(span.category, 0.0) + span.seconds
        return totals

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format, which Perfetto and chrome://tracing open."""
        return {
            "displayTimeUnit": "ms",
            "otherData": {"source": self.source},
            "traceEvents": [*_names(self.spans), *(_event(span) for span in self.spans)],
        }


def _names(spans: Iterable[Span]) -> list[dict[str, Any]]:
    ranks = sorted({span.rank for span in spans})
    return [
        {"ph": "M", "pid": r, "tid": 0, "name": "process_name", "args": {"name": f"rank {r}"}}
        for r in ranks
    ]


def _event(span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": span.rank,
        "tid": 0,
        "name": span.label,
        "cat": span.category,
        "ts": round(span.start * 1e6, 3),
        "dur": round(span.seconds * 1e6, 3),
    }
