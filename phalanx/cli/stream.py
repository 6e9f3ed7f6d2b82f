"""The streams that people read, made safe to write to when nobody reads them any more."""

import json
import os
import sys
from contextlib import suppress
from typing import TextIO

from phalanx.core.secrets import redact


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


def open_closed_streams() -> None:
    """Give a program that was started without standard streams the ones that go nowhere.

    Their numbers would otherwise be given to the next files that are opened, and whoever writes to
    standard output would write into those.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # lowest first: the file that is opened now gets just this number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def lose(stream: TextIO) -> None:
    """Let all further text of a stream go nowhere, what it still holds included."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a line for a person, if there is one: nobody who went away may change an exit code.

    Args:
        text: the line.
        stream: by default standard error.
    """
    lossy = LossyStream(stream or sys.stderr)
    lossy.write(f"{text}\n")
    lossy.flush()


def report_error(message: str, code: int, as_json: bool) -> int:
    """Say on stderr what went wrong; with --json, stdout still gets its one document.

    Args:
        message: one line.
        code: the exit code.
        as_json: whether stdout is for a script.

    Returns:
        The exit code.
    """
    message = redact(message)
    say(f"error: {message}")
    if as_json:
        say(json.dumps({"schema": 1, "error": message, "exit_code": code}), sys.stdout)
    return code


def restore_terminal() -> None:
    """Clear the live line and bring back the cursor, if the process that hid it could not."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\r\x1b[2K\x1b[?25h")
            stream.flush()
            return
