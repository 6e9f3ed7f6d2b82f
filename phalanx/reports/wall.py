"""The wall clock of a run, over all its restarts: terms that add up to it, and its goodput.

It runs from the first start to the last thing that was written, without the time in which the run
was stopped, or its launcher gone, and nobody had asked it to go on: the trainer's own `goodput` in
`summary.json` means the same. Every moment is in one step that counts, or between two of them;
what happened between is read from the events there.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.reports.record import EventRecord, RunRecord, StepRecord
from phalanx.reports.term import ReportTerm
from phalanx.trainer.run.goodput import REPEATED, RESTARTING, SKIPPED, VALIDATION

STEPS, STARTING, ENDING = "steps that count", "starting", "ending"
SAVES, REPORTS, BACK = "saves", "reports", "going back"
UNEXPLAINED = "between steps, unexplained"
_PLAIN = (STEPS, SKIPPED, STARTING, VALIDATION, SAVES, REPORTS)
_ORDER = (*_PLAIN, REPEATED, RESTARTING, BACK, ENDING)
_WHY = {
    STEPS: "each once, as it was done last",
    SKIPPED: "whose update was not finite or not wanted",
    STARTING: "from the event that a session starts to its first step",
    VALIDATION: "loss on held-out text",
    SAVES: "that rank 0 stood still for checkpoints",
    REPORTS: "writing metrics and putting ranks together",
    REPEATED: "from the last step that counts until a failure was noticed",
    RESTARTING: "from a failure until ranks train again",
    BACK: "to a checkpoint, before a spike or what was not finite",
    ENDING: "after the last step of a session: its save, validation and sample",
    UNEXPLAINED: "nothing that was written says what it was",
}


class WallClock(NamedTuple):
    """Where the time of a run went.

    Attributes:
        seconds: in all, but for the time in which it was stopped.
        terms: that add up to it.
        stopped: seconds in which it was stopped.
        restarts: how often ranks were started again.
    """

    seconds: float
    terms: tuple[ReportTerm, ...]
    stopped: float
    restarts: int

    @property
    def goodput(self) -> float | None:
        """Share of the wall clock that is steps that count; None where there is no clock."""
        return None if not self.seconds else (self.terms[0].measured or 0.0) / self.seconds


def wall_clock(record: RunRecord) -> WallClock | None:
    """Account for the time of a run; None where its steps have no times.

    Args:
        record: what it wrote.
    """
    steps = sorted((s for s in record.steps if s.time is not None), key=lambda step: step.begun)
    if not steps:
        return None
    spent = dict.fromkeys((*_ORDER, UNEXPLAINED), 0.0)
    stopped = 0.0
    for step in steps:
        spent[SKIPPED if step.skipped else STEPS] += step.seconds
    for gap in _gaps(steps, record.events):
        for name, seconds in gap.split():
            if name == "stopped":
                stopped += seconds
            else:
                spent[name] += seconds
    _explain(spent, record)
    whole = math.fsum(spent.values())
    names = [name for name in (*_ORDER, UNEXPLAINED) if spent[name] or name == STEPS]
    terms = tuple(
        ReportTerm(
            name=name,
            measured=spent[name],
            share=spent[name] / whole if whole else None,
            why=_WHY[name],
        )
        for name in names
    )
    restarts = sum(event.kind == "restart" for event in record.events)
    return WallClock(whole, terms, stopped, restarts)


class _Gap(NamedTuple):
    """Time that is in no step that counts.

    Attributes:
        begin: in seconds since 1970.
        end: likewise.
        events: in it, in order.
        before: the step before it; None at the beginning.
        after: the step after it; None at the end.
    """

    begin: float
    end: float
    events: Sequence[EventRecord]
    before: StepRecord | None
    after: StepRecord | None

    def split(self) -> Iterator[tuple[str, float]]:
        """What it went to; the parts add up to it."""
        kinds = {event.kind for event in self.events}
        left = self.end - self.begin
        if self.before is not None and left > 0:
            measured = min(self.before.validation_seconds or 0.0, left)
            yield VALIDATION, measured
            left -= measured
        if "restart" in kinds:
            repeated = min(self._repeated(self.end - left), left)
            yield REPEATED, repeated
            yield RESTARTING, left - repeated
        elif self.before is None:
            yield STARTING, left
        elif self.after is None:
            yield ENDING, left
        elif "start" in kinds:  # where it did not say that it stopped, its launcher was killed
            yield from self._across_a_stop(left)
        elif self.after.step <= self.before.step or kinds & {"resume", "spike"}:
            yield BACK, left
        else:
            yield UNEXPLAINED, left

    def _repeated(self, begin: float) -> float:
        """Seconds in which ranks did what is not in the metrics any more: up to each failure."""
        found, since = 0.0, begin
        for event in self.events:
            if event.kind == "start":
                since = event.time
            elif event.kind == "restart":
                found += max(event.time - since, 0.0)
                since = self.end
        return found

    def _across_a_stop(self, left: float) -> Iterator[tuple[str, float]]:
        ends = [event.time for event in self.events if event.kind == "stop"]
        stop = ends[0] if ends else self.end - left
        start = max(event.time for event in self.events if event.kind == "start")
        starting = min(max(self.end - start, 0.0), left)
        stopped = min(max(start - stop, 0.0), left - starting)
        yield STARTING, starting
        yield "stopped", stopped
        yield ENDING, left - starting - stopped


def _gaps(steps: Sequence[StepRecord], events: Sequence[EventRecord]) -> Iterator[_Gap]:
    """All time between the first event and the last thing written that no step covers.

    Steps whose clocks overlap by a little, as after a correction of the clock, leave no gap.
    """
    marks = [event.time for event in events if event.kind in ("start", "restart", "stop")]
    first, last = min([steps[0].begun, *marks]), max([steps[-1].time or 0.0, *marks])
    times = [event.time for event in events]
    begin, before = first, None
    for step in [*steps, None]:
        end = step.begun if step else last
        end = max(end, begin)
        inside = events[bisect_left(times, begin) : bisect_right(times, end)]
        if end > begin or inside:
            yield _Gap(begin, end, inside, before, step)
        if step:
            begin, before = max(step.time or 0.0, begin), step


def _explain(spent: dict[str, float], record: RunRecord) -> None:
    """Move what windows say about saves and reports out of what nothing explains.

    The last save of a session is in `ENDING`: it comes after the last window.
    """
    for name, kind in ((SAVES, "checkpoints"), (REPORTS, "reports")):
        said = math.fsum(window.between.get(kind, 0.0) for window in record.windows)
        moved = min(said, spent[UNEXPLAINED])
        spent[name] += moved
        spent[UNEXPLAINED] -= moved
