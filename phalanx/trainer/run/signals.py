"""The signals that ask a launcher to stop: heard from the first rank's start to the last one's end.

A batch system says SIGTERM, or SIGUSR1 some time before it (Slurm's --signal); a terminal that is
closed says SIGHUP, and a person Ctrl-C, which is SIGINT.
"""

import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from phalanx.core.errors import PhalanxError

INTERRUPTED = 75  # exit code: it was asked to stop, and can go on where it was
HUMAN_SECONDS = 0.5  # two interrupts closer than this are one, heard twice
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class EndedError(PhalanxError):
    """Ranks that were asked to stop had to be ended before they could save."""


class Requests:
    """The signals that asked the launcher to stop.

    Attributes:
        stop: some came.
        hurried: somebody at a keyboard asked twice, and does not want to wait.
        since: when the first came, on the clock of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.stop = False
        self.hurried = False
        self.since = 0.0
        self._interrupted_at = 0.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal; only somebody at a keyboard sends two interrupts.

        Args:
            number: of the signal.
            frame: not looked at; every handler is given it.
        """
        now = time.monotonic()
        self.since = self.since or now
        self.stop = True
        if number == signal.SIGINT:
            self.hurried |= 0.0 < self._interrupted_at < now - HUMAN_SECONDS
            self._interrupted_at = self._interrupted_at or now


@contextmanager
def held_back() -> Iterator[None]:
    """Let processes that are started meanwhile hold the signals back, until they listen."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Remembered:
    """A handler that does nothing yet. No mask could: libraries have threads that lack it."""

    heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard = True


@contextmanager
def remembered(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Let signals of this process wait until somebody listens; those that nobody hears are lost.

    Args:
        numbers: which.
    """
    before = {number: signal.signal(number, _Remembered()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def listening() -> Iterator[Requests]:
    """Take signals as requests to stop, also those that came before; from the main thread."""
    requests = Requests()
    before = {number: signal.signal(number, requests.note) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if isinstance(handler, _Remembered) and handler.heard:
            requests.note(number, None)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
