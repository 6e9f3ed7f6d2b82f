"""What happened to a run, one line each, in a file that is written whether or not anybody looks.

Two processes write to `events.jsonl`: rank 0, and the launcher, which alone is left to tell when a
rank dies. Each line is one write at the end of the file, so that neither tears those of the other.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

EventKind = Literal[
    "start", "resume", "restart", "save", "set aside", "spike", "straggler", "suspicion", "stop"
]
Kind = EventKind | Literal["note"]
KINDS: tuple[str, ...] = (*get_args(EventKind), "note")


def _nobody(text: str) -> None:
    """Show it to nobody."""


class EventLog:
    """Tells what happens: a line on the screen, and an object in `events.jsonl`.

    Telling never raises: a full disk must not end a run that still has to save. What could not be
    written is kept, and written before the next event.
    """

    def __init__(self, path: Path | None, show: Callable[[str], None] = _nobody) -> None:
        """Write nothing yet.

        Args:
            path: of the file; None writes nothing.
            show: is told each text; it may not raise.
        """
        self.path = path
        self._show = show
        self._unwritten = b""
        self._lock = threading.Lock()  # saves tell from a thread of theirs

    def tell(
        self,
        kind: Kind,
        text: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        **data: Any,
    ) -> None:
        """Show an event, and write it down.

        Args:
            kind: what happened; `note` is anything that is only worth a line.
            text: one line for a person.
            step: how many steps were done, where that says something.
            rank: whom it is about.
            data: more about it, as JSON can hold it.
        """
        self.write(kind, text, step=step, rank=rank, **data)
        self._show(text)

    def write(
        self,
        kind: Kind,
        text: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        **data: Any,
    ) -> None:
        """Write down what the screen shows in another way; see `tell`.

        Args:
            kind: what happened.
            text: one line for a person.
            step: how many steps were done, where that says something.
            rank: whom it is about.
            data: more about it; what JSON cannot hold is written as `str` shows it.
        """
        if self.path is None:
            return
        event = {"time": time.time(), "kind": kind, "step": step, "rank": rank, "text": text}
        line = json.dumps({**event, "data": data}, default=str) + "\n"
        with self._lock, suppress(OSError):
            self._unwritten += line.encode()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(descriptor, self._unwritten)
                self._unwritten = self._unwritten[written:]
            finally:
                os.close(descriptor)

    def note(self, text: str) -> None:
        """Tell what is only worth a line."""
        self.tell("note", text)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a run, oldest first; a torn line is left out, and a missing file is empty."""
    events = []
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
    return events
