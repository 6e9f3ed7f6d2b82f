"""Everything a save does to the disk, one method each, so that a test can stop it anywhere."""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple

CHUNK = 8 << 20  # bytes written and hashed at a time


class Disk:
    """The real file system. Every method raises OSError when it fails."""

    def make_directory(self, path: Path) -> None:
        """Make `path` and its parents, unless they are there."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> FileIO:
        """Open a new, empty, unbuffered file for writing."""
        return FileIO(path, "w")

    def write(self, file: FileIO, data: memoryview) -> None:
        """Write all of `data`.

        Args:
            file: as `create` gives it.
            data: one byte an element.
        """
        while len(data):
            data = data[file.write(data) :]

    def sync(self, file: FileIO) -> None:
        """Return only when the file's bytes would survive a power cut."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Return only when the names in `path` would survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or a directory within one file system, all at once.

        Args:
            source: what is moved.
            target: its new path; what is there is replaced if it is a file, or an empty directory
                for a directory.
        """
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove one file."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and everything in it."""
        shutil.rmtree(path)


class Written(NamedTuple):
    """What is on the disk: size and sha256 (lower-case hex)."""

    bytes: int
    sha256: str


def write_file(disk: Disk, path: Path, chunks: Iterable[memoryview]) -> Written:
    """Write `chunks` to a new file, make it durable, and say what it must read back as.

    The hash of a chunk is computed while the chunk is being written.

    Args:
        disk: the file system.
        path: of the file; if there is one, it is emptied first.
        chunks: one byte an element.

    Raises:
        OSError: the disk has failed.
    """
    digest, size = hashlib.sha256(), 0
    with disk.create(path) as file, ThreadPoolExecutor(max_workers=1) as hasher:
        for chunk in chunks:
            hashed = hasher.submit(digest.update, chunk)
            disk.write(file, chunk)
            hashed.result()
            size += len(chunk)
        disk.sync(file)
    return Written(size, digest.hexdigest())


def hash_file(path: Path) -> str:
    """The sha256 of what is on the disk now."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_plain(path: Path) -> FileIO:
    """Open a file that lies where it is said to lie, for reading.

    A link is not followed, and a pipe or a device is not waited for.

    Raises:
        OSError: it is no plain file, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return FileIO(descriptor, "r")


def plain_size(path: Path) -> int:
    """Bytes of a file that lies where it is said to lie.

    Raises:
        OSError: it is no plain file, or is not there.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return found.st_size
