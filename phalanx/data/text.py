"""Many text files as one row of bytes, always in the same order, a zero byte after each."""

import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError

SOURCES = (
    "a text file, a folder of text files, a .npy, .bin or .ds file of token ids, "
    "what phalanx data tokenize has written, "
    "or nothing for the sources of the Python standard library"
)
TOKENS = frozenset((".npy", ".bin", ".ds"))
RECORDS = frozenset((".jsonl", ".ndjson", ".parquet", ".arrow"))
PACKED = frozenset((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".npz"))
FOLDER_LIMIT = 4 << 30  # bytes; every rank holds a folder in memory, while a file is mapped

# Tests are left out because some distributions of Python do not ship them.
_NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Folder:
    """The texts of a folder, joined.

    Attributes:
        text: uint8, one-dimensional; each file is followed by a zero byte.
        num_files: texts that were joined; empty ones do not count.
        num_binary: files left out because they hold a zero byte, so are not text.
        num_others: files left out because their suffix says token ids, records or compression.
        others: suffixes of those, sorted.
    """

    text: NDArray[np.uint8]
    num_files: int
    num_binary: int
    num_others: int = 0
    others: tuple[str, ...] = ()

    @property
    def left_out(self) -> str:
        """What was left out, in words; empty where all was read."""
        parts = []
        if self.num_binary:
            parts.append(f"{self.num_binary} binary")
        if self.num_others:
            parts.append(f"{self.num_others} {', '.join(self.others)}")
        return " and ".join(parts)


def read_library() -> Folder:
    """Read the sources of the running Python's standard library: about 12 MB in 40 ms.

    Raises:
        DataError: this Python has no readable sources (some are shipped as one zip file).
    """
    root = sysconfig.get_path("stdlib")
    names = [name for name in walk(root, skip=_NOT_LIBRARY) if name.endswith(".py")]
    if not names:
        raise DataError(f"no Python sources in {root}; name a text with data.path")
    return _join(root, names)


def read_folder(root: Path) -> Folder:
    """Read every text file below `root`, whatever its suffix, in the order of their paths.

    A file that holds a zero byte is not text and is left out, so a zero byte can end a document.
    Files of token ids, of records (JSON lines, Parquet) and compressed ones are left out too, and
    hidden files and folders. Links are followed, and a folder is read once, however often linked.

    Raises:
        DataError: there is no text, or more than fits in memory comfortably.
        OSError: a file or folder cannot be read.
    """
    names = walk(str(root), links=True)
    others = [name for name in names if _suffix(name) in TOKENS | RECORDS | PACKED]
    folder = replace(
        _join(str(root), [name for name in names if name not in frozenset(others)]),
        num_others=len(others),
        others=tuple(sorted({_suffix(name) for name in others})),
    )
    if not folder.num_files:
        raise DataError(f"no text in {root}: {_instead(root, folder)}")
    return folder


def _instead(root: Path, folder: Folder) -> str:
    """What was found where there is no text in `root`, and what to do."""
    found = f"found {folder.left_out} files" if folder.left_out else "found no files"
    if set(folder.others) & TOKENS:
        return f"{found}; a run reads one file of token ids: join them, or name one with data.path"
    if set(folder.others) & RECORDS:
        return f"{found}; make token ids of the records: phalanx data tokenize {root} -o tokens"
    return f"{found}; data.path can be {SOURCES}"


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def walk(root: str, skip: frozenset[str] = frozenset(), *, links: bool = False) -> list[str]:
    """Paths of the files below `root`, relative to it and sorted, with / on every system.

    Args:
        root: a folder.
        skip: names of folders that are left out, besides hidden ones.
        links: follow links to folders; each folder is entered once.

    Raises:
        OSError: a folder cannot be read.
    """

    def stop(error: OSError) -> None:
        raise error

    found = []
    seen = {_identity(Path(root))}
    for folder, folders, files in os.walk(root, onerror=stop, followlinks=links):
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if inside == "." else f"{inside}/"
        wanted = sorted(name for name in folders if name not in skip and name[0] != ".")
        if links:  # what is reached twice, or contains itself, is read once
            wanted = [name for name in wanted if _is_new(Path(folder, name), seen)]
        folders[:] = wanted
        found += [prefix + name for name in files if name[0] != "."]
    return sorted(found)


def _is_new(folder: Path, seen: set[tuple[int, int]]) -> bool:
    identity = _identity(folder)
    new = identity not in seen
    seen.add(identity)
    return new


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _join(root: str, names: list[str]) -> Folder:
    joined, num_files, num_binary = bytearray(), 0, 0
    for text in _read(root, names):
        if b"\0" in text:
            num_binary += 1
        elif text:
            num_files += 1
            joined += text
            joined.append(0)
    return Folder(
        text=np.frombuffer(joined, dtype=np.uint8),
        num_files=num_files,
        num_binary=num_binary,
    )


def _read(root: str, names: list[str]) -> Iterator[bytes]:
    status = {path: path.stat() for path in (Path(root, name) for name in names)}
    regular = [path for path in status if stat.S_ISREG(status[path].st_mode)]
    total = sum(status[path].st_size for path in regular)
    if total > FOLDER_LIMIT:
        raise DataError(
            f"{root} holds {total / 1e9:.1f} GB and every rank would read all of it; join the "
            "texts into one file, which is mapped instead"
        )
    for path in regular:
        yield path.read_bytes()
