"""The signals that ask a launcher to stop: heard from the first rank's start to the last one's end.

A batch system says SIGTERM, or SIGUSR1 some time before it (Slurm's --signal); a terminal that is
closed says SIGHUP, and a person Ctrl-C, which is SIGINT.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 75  # exit code: it was asked to stop, and can go on where it was
HUMAN_SECONDS = 0.5  # two interrupts closer than this are one, heard twice
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


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
        """Remember a signal; only somebody at a keyboard sends two interrupts."""
        now = time.monotonic()
        self.since = self.since or now
        self.stop = True
        if number == signal.SIGINT:
            self.hurried |= 0.0 < self._interrupted_at < now - HUMAN_SECONDS
            self._interrupted_at = self._interrupted_at or now


@contextmanager
def listening() -> Iterator[Requests]:
    """Take signals as requests to stop. Call it from the main thread."""
    requests = Requests()
    before = {number: signal.signal(number, requests.note) for number in STOP_SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
