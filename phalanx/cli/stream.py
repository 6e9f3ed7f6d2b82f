"""The streams that people read, made safe to write to when nobody reads them any more."""

import os
import sys
from contextlib import suppress
from typing import TextIO


class LossyStream:
    """Standard output or error that loses text rather than ending the program.

    A closed pipe or a terminal that went away must not stop a run that still has to save; and a
    letter that the terminal's encoding lacks is written as a question mark.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")

    def write(self, text: str) -> int:
        """Write `text`, or lose it."""
        try:
            return self._stream.write(text)
        except OSError:
            lose(self._stream)
        return len(text)

    def flush(self) -> None:
        """Bring what was written to the reader, if there is one."""
        try:
            self._stream.flush()
        except OSError:
            lose(self._stream)

    def isatty(self) -> bool:
        """Whether a person may be looking."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor underneath."""
        return self._stream.fileno()


def lose(stream: TextIO) -> None:
    """Let all further text of a stream go nowhere, what it still holds included."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def show_cursor() -> None:
    """Bring back the cursor that a live line had hidden, if its process could not."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\x1b[?25h")
            stream.flush()
