"""`metrics.jsonl` as it is written while a run trains: a full disk must not end it.

A line stands there whole or not at all. What could not be written is kept and written later, as
far as memory is meant for it; what is dropped is told.
"""

import errno
import json
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.trainer.run.report import StepMetrics

MOST_KEPT_BYTES = 4 << 20  # about ten thousand steps
Tell = Callable[[str], None]


class MetricsFile:
    """Adds lines to a file, now or later; never raises for what the disk says."""

    def __init__(self, path: Path, tell: Tell) -> None:
        """Write nothing yet.

        Args:
            path: of the file; it need not exist.
            tell: is told in a line when it cannot be written, and when it can be again.
        """
        self.path, self._tell = path, tell
        self._waiting: deque[tuple[int, bytes]] = deque()  # (step, line)
        self._bytes = 0
        self._lost = 0
        self._told = False

    def add(self, metrics: StepMetrics) -> None:
        """Add the line of a step, after those that are waiting."""
        line = json.dumps(metrics.to_json(), allow_nan=False)
        self._waiting.append((metrics.step, line.encode() + b"\n"))
        self._bytes += len(self._waiting[-1][1])
        while self._bytes > MOST_KEPT_BYTES:
            self._drop()
            self._lost += 1
        try:
            self._write()
        except OSError as error:
            self._tell_once(f"cannot write {self.path}: {error.strerror}")

    def amend(self, write: Callable[[], None]) -> None:
        """Add to what stands there already.

        Args:
            write: does it; may raise PhalanxError, and has then changed nothing.
        """
        try:
            write()
        except PhalanxError as error:
            self._tell_once(str(error))

    def forget_after(self, step: int) -> None:
        """Drop the lines of later steps that are waiting."""
        self._waiting = deque((of, line) for of, line in self._waiting if of <= step)
        self._bytes = sum(len(line) for _, line in self._waiting)

    def _drop(self) -> None:
        self._bytes -= len(self._waiting.popleft()[1])

    def _tell_once(self, problem: str) -> None:
        if not self._told:
            self._told = True
            self._tell(f"{problem}; training goes on, and metrics are written once there is room")

    def _write(self) -> None:
        """Write all that waits; what is half written when the disk is full is taken away."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o644)
        try:
            while self._waiting:
                (_, line), size = self._waiting[0], os.fstat(descriptor).st_size
                try:
                    whole = os.write(descriptor, line) == len(line)
                except OSError:
                    with suppress(OSError):
                        os.ftruncate(descriptor, size)
                    raise
                if not whole:
                    os.ftruncate(descriptor, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._drop()
        finally:
            os.close(descriptor)
        if self._told:
            lost = f", but for {self._lost} steps, which are lost" if self._lost else ""
            self._tell(f"{self.path} is written again{lost}")
            self._told, self._lost = False, 0
