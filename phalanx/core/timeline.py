"""What happened when, on which rank: planned and measured timelines are the same value."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from phalanx.core.message import Axis

Category = Literal["compute", "communicate", "wait", "optimizer", "data"]


class Span(NamedTuple):
    """One stretch of time on one rank, in seconds from the start of the timeline.

    Attributes:
        rank: whose.
        label: what happened.
        category: of what kind it is.
        start, end: seconds.
        axis: of a message, which lies beside what the rank does meanwhile: "communicate" as long
            as it is under way, "wait" as long as the rank stands still for it.
    """

    rank: int
    label: str
    category: Category
    start: float
    end: float
    axis: Axis | None = None

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks, planned or measured.

    Example:
        >>> spans = Span(0, "0F0", "compute", 0.0, 1.5), Span(1, "1F0", "compute", 1.5, 3.0)
        >>> Timeline("planned", spans).seconds_by_category()
        {'compute': 3.0}

    Attributes:
        source: whether a schedule was played, or ranks were watched.
        spans: in any order.
    """

    source: Literal["planned", "measured"]
    spans: tuple[Span, ...]

    def seconds_by_category(self) -> dict[str, float]:
        """Total seconds of each category, summed over ranks; messages lie beside and add none."""
        return _totals((s.category, s.seconds) for s in self.spans if s.axis is None)

    def exposed_by_axis(self) -> dict[str, float]:
        """Total seconds in which ranks stood still for messages along each axis."""
        return _totals((s.axis, s.seconds) for s in self.spans if s.axis and s.category == "wait")

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format, which Perfetto and chrome://tracing open."""
        return {
            "displayTimeUnit": "ms",
            "otherData": {"source": self.source},
            "traceEvents": [*_names(self.spans), *_events(self.spans)],
        }


def _totals(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, seconds in parts:
        totals[name] = totals.get(name, 0.0) + seconds
    return totals


def _names(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """A process for each rank, and in it a thread for what it does and for its waits by axis."""
    found = sorted({(span.rank, _lane(span)) for span in spans})
    processes = [
        {"ph": "M", "pid": r, "tid": 0, "name": "process_name", "args": {"name": f"rank {r}"}}
        for r in sorted({rank for rank, _ in found})
    ]
    threads = [
        {"ph": "M", "pid": r, "tid": i, "name": "thread_name", "args": {"name": _LANES[i]}}
        for r, i in found
        if i
    ]
    return [*processes, *threads]


_LANES = ("", *(f"waiting for {axis}" for axis in get_args(Axis)))


def _lane(span: Span) -> int:
    return 0 if span.axis is None else 1 + get_args(Axis).index(span.axis)


def _events(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Messages under way overlap each other, so they are events with a start and an end."""
    for number, span in enumerate(spans):
        event = {
            "pid": span.rank,
            "tid": _lane(span),
            "name": span.label,
            "cat": span.category,
            "ts": round(span.start * 1e6, 3),
        }
        if span.axis is not None and span.category == "communicate":
            event |= {"cat": f"messages along {span.axis}", "id": number}
            yield {**event, "ph": "b"}
            yield {**event, "ph": "e", "ts": round(span.end * 1e6, 3)}
        else:
            yield {**event, "ph": "X", "dur": round(span.seconds * 1e6, 3)}
