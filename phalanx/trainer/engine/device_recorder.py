"""Records what a device did when: by events on its streams, since its host runs ahead of it.

A span of the host says how long work took to hand over. Here each span is two events on the
stream that does the work, and a message three: where the stream was when it was issued, where it
came to need it, and where it went on. Events that have passed are read after a step, so that the
host waits for nothing. NVTX ranges of the same names go to whatever profiler listens.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from phalanx.core.message import Axis
from phalanx.core.timeline import Category, Span
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.parallel.ledger import Ledger, Passage

Mark = Any  # a moment of a stream; only its clock can read it


class DeviceClock(Protocol):
    """Moments of the stream that the host hands work to."""

    def mark(self) -> Mark:
        """Mark the moment at which the stream will have done all that it has been given."""

    def has_passed(self, mark: Mark) -> bool:
        """Whether the stream is past a moment."""

    def wait(self, mark: Mark) -> None:
        """Return once the stream is past a moment."""

    def seconds(self, since: Mark, until: Mark) -> float:
        """Between two moments.

        Args:
            since: that has passed.
            until: that has passed too.
        """

    def push(self, label: str) -> None:
        """Begin a range for profilers."""

    def pop(self) -> None:
        """End the last range."""


class CudaClock:
    """CUDA events on the current stream, and NVTX ranges."""

    def mark(self) -> Mark:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Mark) -> bool:
        """Ask the event."""
        return bool(mark.query())

    def wait(self, mark: Mark) -> None:
        """Wait for the event."""
        mark.synchronize()

    def seconds(self, since: Mark, until: Mark) -> float:
        """Between two events.

        Args:
            since: that has passed.
            until: that has passed too.
        """
        return 1e-3 * float(since.elapsed_time(until))

    def push(self, label: str) -> None:
        """Begin an NVTX range."""
        torch.cuda.nvtx.range_push(label)

    def pop(self) -> None:
        """End the last one."""
        torch.cuda.nvtx.range_pop()


@dataclass
class _Stretch:
    """A span or a message of the stream, with those inside it.

    Attributes:
        label: what a timeline shows.
        category: whose seconds it adds to.
        begun, ended: moments; of a message those between which the stream stood still.
        axis: of a message.
        issued: of a message, when it was started.
        inside: stretches that are not part of its own time.
    """

    label: str
    category: Category
    begun: Mark
    ended: Mark = None
    axis: Axis | None = None
    issued: Mark = None
    inside: list["_Stretch"] = field(default_factory=list)


class DeviceRecorder(Recorder):
    """Notes the spans of one rank on the clock of its device.

    Attributes:
        ledger: of the rank, whose `waited` is on the same clock.
        clock: of the device.
    """

    def __init__(self, rank: int, ledger: Ledger, clock: DeviceClock) -> None:
        super().__init__(rank)
        self.ledger, self.clock = ledger, clock
        self._open: list[_Stretch] = []
        self._closed: list[_Stretch] = []
        anchor = clock.mark()
        clock.wait(anchor)
        self._anchor = anchor, time.perf_counter()
        ledger.mark = clock.mark

    @contextmanager
    def span(self, label: str, category: Category) -> Iterator[None]:
        """Time what the device does of what is handed over inside.

        Args:
            label: what a timeline shows.
            category: whose `seconds` it adds to.
        """
        self.doing(label)
        self.clock.push(label)
        stretch = _Stretch(label, category, self.clock.mark())
        self._open.append(stretch)
        try:
            yield
        finally:
            self._open.pop()
            stretch.ended = self.clock.mark()
            self.clock.pop()
            self._close(stretch)

    def message(self, passage: Passage) -> None:
        """Keep a message: how long it was under way, and how long the stream stood still for it."""
        self.arrived()
        if passage.marks is None:  # of the host: a number that all ranks agree on
            super().message(passage)
            return
        issued, wanted, done = passage.marks
        self._close(_Stretch(passage.purpose, "wait", wanted, done, passage.axis, issued))

    def _close(self, stretch: _Stretch) -> None:
        (self._open[-1].inside if self._open else self._closed).append(stretch)

    def collect(self, *, all_of_it: bool = False) -> None:
        """Read the events that have passed; what the device has still to do is read later.

        Args:
            all_of_it: wait for the rest.
        """
        while self._closed:
            first = self._closed[0]
            if all_of_it:
                self.clock.wait(first.ended)
            elif not self.clock.has_passed(first.ended):
                return
            self._read(self._closed.pop(0))
            mark, at = self._anchor  # a nearer one: the clock counts short times more exactly
            self._anchor = first.ended, at + self.clock.seconds(mark, first.ended)

    def _read(self, stretch: _Stretch) -> float:
        """Add a stretch to its totals, and return its seconds."""
        lasts = self.clock.seconds(stretch.begun, stretch.ended)
        elsewhere = sum(self._read(each) for each in stretch.inside)
        if stretch.axis is not None:
            waited = self.ledger.waited
            waited[stretch.axis] = waited.get(stretch.axis, 0.0) + lasts
        else:
            before = self.seconds.get(stretch.category, 0.0)
            self.seconds[stretch.category] = before + max(lasts - elsewhere, 0.0)
        if self.keeps_spans:
            self._keep(stretch)
        return lasts

    def _keep(self, stretch: _Stretch) -> None:
        begun, ended, axis = self._at(stretch.begun), self._at(stretch.ended), stretch.axis
        if axis is not None:
            under_way = Span(
                self.rank, stretch.label, "communicate", self._at(stretch.issued), ended, axis
            )
            self.spans.append(under_way)
        self.spans.append(Span(self.rank, stretch.label, stretch.category, begun, ended, axis))

    def _at(self, mark: Mark) -> float:
        """A moment on the clock of the host."""
        anchor, at = self._anchor
        return at + self.clock.seconds(anchor, mark)
