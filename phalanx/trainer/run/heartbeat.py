"""What a rank is doing, written where its launcher can read it even when the rank answers no more.

A small file for each rank is mapped into its memory: a beat is a few bytes written there, without
a call of the system, and stays readable whatever becomes of the process. Times are those of
`time.monotonic`, one clock for all processes of a machine.
"""

import faulthandler
import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

LEAST_SECONDS = 5.0  # without a beat, before anybody is suspected
STEPS = 5.0  # so many median steps, if that is more
SLOW_SECONDS = 1800.0  # in what may take long and says so: start, compile, save
DATA_SECONDS = 300.0  # for a batch
COMPILE_SECONDS = 300.0  # for a step that may find out that a graph must be compiled again
PHASE_SECONDS = {"checkpoints": SLOW_SECONDS, "reports": 60.0}  # what lies between steps
STACK_SIGNAL = signal.SIGUSR2
LEFT = "left"  # the phase of a rank that has nothing more to do

_HEAD = struct.Struct("<Qddqq")  # beats, time of the last, seconds it may take, step, pid
_PHASE, _DOING, _MESSAGE = slice(48, 64), slice(64, 128), slice(128, 192)
_SIZE = 192
_LENGTH = 64


class Pulse(NamedTuple):
    """What a rank said last.

    Attributes:
        rank: which one.
        beats: how many so far.
        time: of the last, in seconds of the monotonic clock.
        limit: seconds after which the next is overdue.
        step: that it is in, from 0; -1 before the first.
        pid: of its process.
        phase: start, train, checkpoints, validation, reports, data; or that it has left.
        doing: the last action that it began.
        message: that it waits for, with its axis; empty where it does not wait.
    """

    rank: int
    beats: int
    time: float
    limit: float
    step: int
    pid: int
    phase: str
    doing: str
    message: str


class Heartbeat:
    """Beats for one rank; without a folder, for nobody."""

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        """Map the file of this rank, and let a signal write its Python stack beside it.

        Args:
            folder: that the launcher watches.
            rank: among all ranks.
        """
        self._map: mmap.mmap | bytearray = bytearray(_SIZE)
        self._beats, self._step, self._pid = 0, -1, os.getpid()
        self._limit = self._step_limit = SLOW_SECONDS
        self._phase = "start"
        self._stack: BinaryIO | None = None
        if folder is not None:
            path = folder / beat_name(rank)
            path.write_bytes(bytes(_SIZE))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE)
            self._stack = (folder / stack_name(rank)).open("wb")
            faulthandler.register(STACK_SIGNAL, file=self._stack, all_threads=False)
        self.phase("start")

    def phase(self, name: str, limit: float = 0.0) -> tuple[str, float]:
        """Begin another kind of work.

        Args:
            name: of it.
            limit: seconds that it may take between two beats; 0 for those of a step.

        Returns:
            The phase before, with its limit.
        """
        before = self._phase, self._limit
        self._phase, self._limit = name, limit or self._step_limit
        self._write(_PHASE, name)
        self.doing("")
        return before

    def step(self, step: int, median_seconds: float, least: float = LEAST_SECONDS) -> None:
        """Begin a step, knowing how long the last ones took.

        Args:
            step: from 0.
            median_seconds: of the last steps; 0 where they were the first, which may be slow.
            least: seconds that it may take in any case.
        """
        self._step = step
        if median_seconds:
            self._step_limit = max(least, STEPS * median_seconds)
        self.phase("train")

    def doing(self, action: str) -> None:
        """Begin an action."""
        self._write(_DOING, action)
        self._beat()

    def waits(self, axis: str, purpose: str) -> None:
        """Begin to wait for a message.

        Args:
            axis: along which it travels.
            purpose: of it; the line of both is cut after 64 bytes.
        """
        self._write(_MESSAGE, f"{purpose!r} along {axis}")
        self._beat()

    def arrived(self) -> None:
        """The message is here."""
        self._map[_MESSAGE.start] = 0
        self._beat()

    def close(self) -> None:
        """Write no more beats, and no stack; the files stay."""
        self._map = bytearray(self._map)
        if self._stack is not None:
            faulthandler.unregister(STACK_SIGNAL)
            self._stack.close()
            self._stack = None

    def _beat(self) -> None:
        self._beats += 1
        _HEAD.pack_into(
            self._map, 0, self._beats, time.monotonic(), self._limit, self._step, self._pid
        )

    def _write(self, place: slice, text: str) -> None:
        raw = text.encode()[: place.stop - place.start]
        self._map[place] = raw.ljust(place.stop - place.start, b"\0")


def beat_name(rank: int) -> str:
    """The file that a rank writes its beats to."""
    return f"beat-{rank}"


def stack_name(rank: int) -> str:
    """The file that a rank writes its Python stack to when it is asked by `STACK_SIGNAL`."""
    return f"stack-{rank}"


def read_pulse(folder: Path, rank: int) -> Pulse | None:
    """What a rank said last; None where it said nothing yet.

    Args:
        folder: where ranks write their beats.
        rank: among all ranks.
    """
    try:
        raw = (folder / beat_name(rank)).read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < _SIZE:
        return None
    beats, seconds, limit, step, pid = _HEAD.unpack_from(raw)
    if not beats:
        return None
    texts = (raw[place].split(b"\0")[0].decode(errors="replace") for place in _PLACES)
    return Pulse(rank, beats, seconds, limit, step, pid, *texts)


_PLACES = (_PHASE, _DOING, _MESSAGE)
