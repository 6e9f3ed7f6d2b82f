"""Sends the figures of a run to trackers, from a thread: training never waits for one.

A tracker is a module of this package with a function `open_tracker(place)`, imported only where a
run asks for it, in its thread. Whatever it raises ends it, and only it, with one line.
"""

import importlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from phalanx.core.run import Run
from phalanx.core.secrets import redact
from phalanx.trainer.run.report import Reporter, RunInfo, StepMetrics, Summary

MOST_WAITING = 10_000  # steps
CLOSE_SECONDS = 15.0  # for all trackers to write what waits, at the end
Values = Mapping[str, float]


class TrackedRun(NamedTuple):
    """What a tracker is opened with.

    Attributes:
        name: of the run.
        project: that it is filed under.
        folder: for its files; it exists, and is the same whenever the run goes on.
        first_step: steps that were done before; above 0 after a resume.
        config: every value of the run file, by `section.key`, without secrets.
    """

    name: str
    project: str
    folder: Path
    first_step: int
    config: Mapping[str, str]


class Tracker(Protocol):
    """One that is open. May raise anything: it is then left alone."""

    def add(self, step: int, values: Values, when: float) -> None:
        """Draw values.

        Args:
            step: how many are done, from 1. It falls where a run goes back.
            values: by the names of `metrics.jsonl`.
            when: in seconds since 1970.
        """

    def close(self) -> None:
        """Write what is left."""


class _Point(NamedTuple):
    step: int
    values: Values
    when: float


class Feed:
    """The way to one tracker: a queue with an end, and the thread behind it."""

    def __init__(self, name: str, place: TrackedRun, tell: Callable[[str], None]) -> None:
        """Open it in its thread.

        Args:
            name: of the tracker.
            place: what it is opened with.
            tell: is told in a line, once, what is wrong with it.
        """
        self.name, self._place, self._tell = name, place, tell
        self._points: queue.Queue[_Point | None] = queue.Queue(MOST_WAITING)
        self._lost = 0
        self._down = False
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def add(self, point: _Point) -> None:
        """Send a point; never waits. Where the queue is full its oldest point is lost."""
        self._put(point)

    def end(self) -> None:
        """Let it close once it has drawn what waits; `join` waits for that."""
        self._put(None)

    def join(self, deadline: float) -> None:
        """Wait until it has closed, and tell what it has lost.

        Args:
            deadline: on the clock of `time.monotonic`.
        """
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        waiting = self._points.qsize() if self._thread.is_alive() else 0
        if not self._down and self._lost + waiting:
            self._tell(f"track: {self.name} is slow; it lacks {self._lost + waiting} points")

    def _put(self, point: _Point | None) -> None:
        while not self._down:
            try:
                self._points.put_nowait(point)
                return
            except queue.Full:
                self._drop()

    def _drop(self) -> None:
        try:
            self._points.get_nowait()
            self._lost += 1
        except queue.Empty:
            pass

    def _work(self) -> None:
        try:
            module = importlib.import_module(f"phalanx.trainer.track.{self.name}")
            tracker: Tracker = module.open_tracker(self._place)
            while (point := self._points.get()) is not None:
                tracker.add(*point)
            tracker.close()
        except ModuleNotFoundError as error:
            extra = f"pip install 'phalanx[{self.name}]'"
            self._leave(f"{self.name} needs {error.name}, which is not installed: {extra}")
        except BaseException as error:  # a library may even call exit
            told = " ".join(redact(str(error)).split())[:200] or type(error).__name__
            self._leave(f"{self.name} has failed: {told}")

    def _leave(self, why: str) -> None:
        self._down = True
        self._tell(f"track: {why}; training goes on without it")


@dataclass
class Tracked:
    """A reporter that also feeds trackers.

    Attributes:
        inner: the one that shows the run.
        run: whose trackers they are.
        folder: of the run.
        tell: is told what is wrong with a tracker.
    """

    inner: Reporter
    run: Run
    folder: Path
    tell: Callable[[str], None]
    feeds: tuple[Feed, ...] = ()

    def on_start(self, info: RunInfo) -> None:
        """Open the trackers, in threads of their own."""
        self.inner.on_start(info)
        folder = self.folder / "track"
        track = self.run.track
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            self.tell(f"track: cannot write {folder}: {error.strerror}; training goes on")
            return
        place = TrackedRun(info.name, track.project, folder, info.first_step, config_of(self.run))
        self.feeds = tuple(Feed(name, place, self.tell) for name in track.trackers)

    def on_step(self, metrics: StepMetrics) -> None:
        """Draw what a step measured."""
        self.inner.on_step(metrics)
        self._add(metrics.step, values_of(metrics.to_json()), metrics.time)

    def on_validation(self, step: int, loss: float) -> None:
        """Draw the loss on held-out text.

        Args:
            step: how many steps were done.
            loss: nats per token.
        """
        self.inner.on_validation(step, loss)
        self._add(step, values_of({"validation_loss": loss}), time.time())

    def on_event(self, text: str) -> None:
        """Trackers draw numbers; the text is in `events.jsonl`."""
        self.inner.on_event(text)

    def on_end(self, summary: Summary) -> None:
        """Close them; together they have some seconds for what still waits."""
        self.inner.on_end(summary)
        for feed in self.feeds:
            feed.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self.feeds:
            feed.join(deadline)

    def _add(self, step: int, values: Values, when: float) -> None:
        for feed in self.feeds:
            feed.add(_Point(step, values, when))


def values_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a line of `metrics.jsonl`, flat.

    Example:
        >>> values_of({"step": 3, "loss": 2.5, "mfu": None, "exposed_seconds": {"tensor": 0.1}})
        {'loss': 2.5, 'exposed_seconds/tensor': 0.1}
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": number for key, number in values_of(value).items()}
        elif isinstance(value, int | float) and name not in ("step", "time"):
            found[name] = float(value)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def config_of(run: Run) -> dict[str, str]:
    """Every value of a run file by `section.key`, as text without secrets."""
    found, section = {"layout": str(run.layout)}, ""
    for line in run.to_toml().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and not line.startswith("#"):
            key, _, value = line.partition(" = ")
            found[f"{section}.{key}"] = redact(value.strip('"'))
    return found


def remembered(file: Path, make: Callable[[], str]) -> str:
    """The name under which a tracker knows a run; made once, so that a resumed run is one curve.

    Args:
        file: where it is kept.
        make: makes it.
    """
    if not file.exists():
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
