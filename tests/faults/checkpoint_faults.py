"""What the fault tests of checkpoints share: two ranks, what they save, and disks that go wrong.

Run as a program, it saves in child processes that kill themselves at every operation in turn.
"""

import errno
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from phalanx.trainer.checkpoint import Piece, Saver
from phalanx.trainer.checkpoint.disk import Disk

WORLD = 2
SIZE = 5000


def content(value: int) -> torch.Tensor:
    """A tensor that no other value gives."""
    return torch.arange(SIZE) * 0.5 + value * 1000.0


def pieces(value: int, rank: int) -> list[Piece]:
    """What a rank saves: its half of `content(value)`."""
    start, stop = SIZE * rank // WORLD, SIZE * (rank + 1) // WORLD
    data = content(value)[start:stop].clone()
    return [Piece("w", "weight", (SIZE,), (0,), (SIZE,), start, stop, data)]


def make_savers(
    directory: Path, attempt: str, disks: Sequence[Disk] = (), **options: object
) -> list[Saver]:
    """One saver per rank, each on its own disk."""
    disks = disks or [Disk()] * WORLD
    return [
        Saver(directory, rank, WORLD, attempt=attempt, disk=disk, **options)  # type: ignore[arg-type]
        for rank, disk in enumerate(disks)
    ]


def start_all(savers: Sequence[Saver], step: int, value: int) -> None:
    """Begin a save of `content(value)` on all ranks."""
    for saver in savers:
        saver.save(step, pieces(value, saver.rank), {"value": value})


def save_all(savers: Sequence[Saver], step: int, value: int) -> list[str]:
    """Save `content(value)`; returns what each rank is told, the empty text for success."""
    start_all(savers, step, value)
    return [told(saver) for saver in savers]


def told(saver: Saver) -> str:
    """What a rank is told when it waits for its save."""
    try:
        saver.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class TrippingDisk(Disk):
    """Does `trip` instead of one operation, the `at`-th; a write or a removal is half done then."""

    def __init__(self, at: int, trip: Callable[[], None]) -> None:
        self.at, self.trip = at, trip
        self.log: list[str] = []
        self._lock = threading.Lock()

    @property
    def tripped(self) -> bool:
        return len(self.log) > self.at

    def _turn(self, what: str) -> bool:
        with self._lock:
            self.log.append(what)
            return len(self.log) == self.at + 1

    def _do(self, what: str, *arguments):
        if self._turn(what):
            self.trip()
        return getattr(Disk, what)(self, *arguments)

    def make_directory(self, path):
        self._do("make_directory", path)

    def create(self, path):
        return self._do("create", path)

    def write(self, file, data):
        if self._turn("write"):
            Disk.write(self, file, data[: len(data) // 2])
            self.trip()
        Disk.write(self, file, data)

    def sync(self, file):
        self._do("sync", file)

    def sync_directory(self, path):
        self._do("sync_directory", path)

    def rename(self, source, target):
        self._do("rename", source, target)

    def remove(self, path):
        self._do("remove", path)

    def remove_tree(self, path):
        if self._turn("remove_tree"):
            for file in sorted(path.iterdir())[:1]:
                file.unlink()
            self.trip()
        Disk.remove_tree(self, path)


class FullDisk(Disk):
    """Has room for so many bytes; what is removed gives its room back."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file, data):
        fits = data[: self.room]
        super().write(file, fits)
        self.room -= len(fits)
        if len(fits) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def remove(self, path):
        size = path.stat().st_size
        super().remove(path)
        self.room += size


def _cut() -> None:
    raise OSError(errno.EIO, "the power is off")


class PowerCut(TrippingDisk):
    """From operation `at` on nothing works, and what was not synced may be lost."""

    def __init__(self, at: int) -> None:
        super().__init__(at, _cut)
        self.unsynced: set[Path] = set()
        self.unnamed: set[Path] = set()
        self.moved: list[tuple[Path, Path]] = []

    def _turn(self, what: str) -> bool:
        if self.tripped:
            _cut()
        return super()._turn(what)

    def create(self, path):
        file = super().create(path)
        self.unsynced.add(path)
        self.unnamed.add(path)
        return file

    def sync(self, file):
        super().sync(file)
        self.unsynced.discard(Path(os.fsdecode(file.name)))

    def sync_directory(self, path):
        super().sync_directory(path)
        with self._lock:
            self.unnamed = {name for name in self.unnamed if name.parent != path}
            self.moved = [(old, new) for old, new in self.moved if new.parent != path]

    def rename(self, source, target):
        super().rename(source, target)

        def now(path: Path) -> Path:
            return target / path.relative_to(source) if path.is_relative_to(source) else path

        with self._lock:
            self.unsynced = {now(path) for path in self.unsynced}
            self.unnamed = {now(path) for path in self.unnamed}
            self.moved.append((source, target))

    def lose(self, *, renames: bool) -> None:
        """Do the worst that a power cut may do; `renames` undoes those that were not synced."""
        for path in self.unnamed:
            path.unlink(missing_ok=True)
        for path in self.unsynced - self.unnamed:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for source, target in reversed(self.moved) if renames else ():
            if target.exists():
                target.rename(source)
            elif source.parent.exists():  # deleted after the move: it is back, and empty
                source.mkdir()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _in_child(work: Callable[[], None]) -> int:
    """Run `work` in a copy of this process; returns its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def _save_over(directory: Path, step: int, disk: Disk) -> None:
    save_all(make_savers(directory, "b", [disk] * WORLD, keep=1), step, 2)


def kill_everywhere(before: Path, room: Path, step: int) -> list[int]:
    """Save over copies of `before`, killed at operation 0, 1, 2, ... until one survives."""
    killed = []
    for at in itertools.count():
        copy = room / str(at)
        shutil.copytree(before, copy)
        disk = TrippingDisk(at, _kill)
        status = _in_child(partial(_save_over, copy, step, disk))
        if not os.WIFSIGNALED(status):
            break
        killed.append(at)
    return killed


def save_under_a_limit(directory: Path, limit: int) -> None:
    """Save while no file may grow beyond `limit` bytes; print what they are told."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    print(json.dumps(save_all(make_savers(directory, "b"), 2, 2)))  # noqa: T201  read by the test


if __name__ == "__main__":
    command, first, second, number = sys.argv[1:]
    if command == "kill":
        print(json.dumps(kill_everywhere(Path(first), Path(second), int(number))))  # noqa: T201
    else:
        save_under_a_limit(Path(first), int(number))
