"""The documents of a source, in an order that does not depend on who reads which of them.

A source is cut into parts of about the same size, which workers read side by side: some small
files, a stretch of a large one, some row groups of a Parquet file. A document of text is a file, or
what lies between two zero bytes; of JSON lines, a line; of Parquet and Arrow, a row.
"""

import bz2
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from phalanx.core.errors import DataError, UsageError, shorten
from phalanx.data.kinds import refuse_binary
from phalanx.data.text import TOKENS, walk
from phalanx.data.tokenizers import library

PART_BYTES = 16 << 20  # of a source, in one part
PIECE_BYTES = 1 << 20  # of a text, in one piece: a longer document is encoded in several
_LINES = frozenset((".jsonl", ".ndjson"))
_PACKED = frozenset((".gz", ".bz2", ".xz", ".zst"))
_RATIO = 4  # bytes of text in a byte of compressed text, roughly
_BREAK = re.compile(rb"\n(?=\S)")  # where a text may be cut: a line that starts with a letter
_LOOK_FOR_BREAK = 1 << 16


class FilePart(NamedTuple):
    """Some of a file.

    Attributes:
        path: of the file.
        start, stop: bytes of it; of Parquet, its row groups; a compressed file is read whole.
    """

    path: Path
    start: int
    stop: int


class Document(NamedTuple):
    """One document, or a piece of a long one.

    Attributes:
        value: its text; of a chat, what the line says.
        ends: it is the end of its document.
    """

    value: Any
    ends: bool = True


@dataclass(frozen=True)
class Source:
    """What is tokenized.

    Attributes:
        parts: each some stretches, read one after the other.
        files: how many there are.
        bytes: of all of them.
        left_out: files that are not text, with the reason.
    """

    parts: tuple[tuple[FilePart, ...], ...]
    files: int
    bytes: int
    left_out: tuple[str, ...] = ()


def find_source(path: Path) -> Source:
    """Look at a file or a folder, and cut it into parts.

    Args:
        path: a text, JSON lines, Parquet, any of them compressed (.gz, .bz2, .xz, .zst), a dataset
            that `datasets` saved to disk, or a folder of these.

    Raises:
        UsageError: there is no such thing, or nothing in it that can be read.
    """
    if not path.exists():
        raise UsageError(f"there is no {path}; a source is a file or a folder of text or records")
    names = [path] if path.is_file() else [path / name for name in walk(str(path), links=True)]
    kept, left_out = [], []
    for file in names:
        reason = _unreadable(file, alone=path.is_file())
        if reason:
            left_out.append(f"{file.name}: {reason}")
        elif file.stat().st_size:
            kept.append(file)
    if not kept:
        found = f"; left out: {shorten(left_out, 3)}" if left_out else ""
        raise UsageError(f"{path} has no text and no records{found}")
    total = sum(file.stat().st_size for file in kept)
    return Source(tuple(_parts(kept)), len(kept), total, tuple(left_out))


def _unreadable(file: Path, *, alone: bool) -> str:
    """Why a file cannot be read; empty where it can."""
    suffix = file.suffix.lower()
    if suffix in TOKENS | {".npz", ".zip", ".tar", ".tgz"}:
        return f"{suffix} is neither text nor records"
    if _is_dataset_part(file):
        return "" if suffix == ".arrow" else "describes the dataset"
    if suffix in _PACKED | _LINES | {".parquet", ".arrow"}:
        return ""
    try:
        refuse_binary(file)
    except DataError as error:
        if alone:
            raise UsageError(str(error)) from None
        return "binary"
    return ""


def _is_dataset_part(file: Path) -> bool:
    """Whether a file belongs to a dataset as `datasets.save_to_disk` writes it."""
    return file.name in ("dataset_info.json", "state.json", "dataset_dict.json") or (
        file.suffix == ".arrow" and (file.parent / "state.json").is_file()
    )


def _parts(files: list[Path]) -> Iterator[tuple[FilePart, ...]]:
    """Small files together, large ones in stretches."""
    held: list[FilePart] = []
    size = 0
    for file in files:
        for stretch, weight in _stretches(file):
            if held and size + weight > PART_BYTES:
                yield tuple(held)
                held, size = [], 0
            held.append(stretch)
            size += weight
    if held:
        yield tuple(held)


def _stretches(file: Path) -> Iterator[tuple[FilePart, int]]:
    """Stretches of a file, each with about how many bytes of text it has."""
    size, suffix = file.stat().st_size, file.suffix.lower()
    if suffix in _PACKED:
        yield FilePart(file, 0, size), size * _RATIO
    elif suffix == ".parquet":
        groups = _parquet(file).metadata.num_row_groups
        for group in range(groups):
            yield FilePart(file, group, group + 1), size * _RATIO // groups
    elif suffix == ".arrow":
        _require_plain_order(file)
        yield FilePart(file, 0, size), size
    else:
        for start in range(0, size, PART_BYTES):
            stop = min(start + PART_BYTES, size)
            yield FilePart(file, start, stop), stop - start


def documents(part: tuple[FilePart, ...], column: str) -> Iterator[Document]:
    """Read the documents of a part.

    Args:
        part: some stretches.
        column: of the text in records.

    Raises:
        DataError: a file is damaged, or a record has no such column.
    """
    for stretch in part:
        try:
            yield from _read(stretch, column)
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, OSError) as error:
            raise DataError(f"{stretch.path} cannot be read: {error}") from error


def _read(stretch: FilePart, column: str) -> Iterator[Document]:
    path, suffixes = stretch.path, [s.lower() for s in stretch.path.suffixes]
    last = suffixes[-1] if suffixes else ""
    if last == ".parquet":
        yield from _rows(_parquet_batches(stretch, column), path, column)
    elif last == ".arrow":
        yield from _rows(_arrow_batches(path), path, column)
    elif last in _PACKED:
        inner = suffixes[-2] if len(suffixes) > 1 else ""
        with _unpacked(path) as file:
            if inner in _LINES:
                yield from _json_lines(path, enumerate(file, 1), column)
            else:
                yield from _texts(file.read())
    elif last in _LINES:
        with path.open("rb") as file:
            yield from _json_lines(path, _own_lines(file, stretch), column)
    else:
        yield from _own_text(stretch)


def _own_lines(file: IO[bytes], stretch: FilePart) -> Iterator[tuple[int, bytes]]:
    """The lines that begin within a stretch, each with the byte that it begins at."""
    file.seek(max(stretch.start - 1, 0))
    if stretch.start:
        file.readline()  # of which an earlier stretch has the beginning
    while (at := file.tell()) < stretch.stop:
        line = file.readline()
        if not line:
            return
        yield at, line


def _json_lines(path: Path, lines: Iterator[tuple[int, bytes]], column: str) -> Iterator[Document]:
    for at, line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} at {at:,}: a line is no JSON: {error}") from None
        yield Document(_value(record, path, column))


def _value(record: Any, path: Path, column: str) -> Any:
    """A text, or the whole of a record that is a chat or a prompt with its completion."""
    if not isinstance(record, dict):
        raise DataError(f"{path}: a record is {str(record)[:40]!r}, no table of keys")
    if isinstance(record.get(column), str):
        return record[column]
    if "messages" in record or {"prompt", "completion"} <= record.keys():
        return record
    keys = shorten(record)
    raise DataError(f"{path}: a record has no text {column!r}; --column can be one of {keys}")


def _own_text(stretch: FilePart) -> Iterator[Document]:
    """The text between two cuts of a file, which do not depend on where parts begin."""
    path = stretch.path
    with path.open("rb") as file:
        size = path.stat().st_size
        start, end = _cut(file, stretch.start, size), _cut(file, stretch.stop, size)
        file.seek(start)
        text = file.read(max(end - start, 0))
    if text:
        yield from _texts(text, ends=end == size)


def _cut(file: IO[bytes], nominal: int, size: int) -> int:
    """The first place from `nominal` on at which a text may be cut."""
    if nominal in (0, size):
        return nominal
    file.seek(nominal)
    ahead = file.read(_LOOK_FOR_BREAK)
    zero, found = ahead.find(b"\0"), _BREAK.search(ahead)
    if zero >= 0:
        return nominal + zero + 1
    if found:
        return nominal + found.end()
    return nominal + next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), 0)


def _texts(text: bytes, *, ends: bool = True) -> Iterator[Document]:
    """Documents end at zero bytes; long ones come in pieces.

    Args:
        text: of a file, or of a stretch of it.
        ends: whether the file ends here.
    """
    whole = text.split(b"\0")
    for number, document in enumerate(whole):
        last = number == len(whole) - 1
        if not document and (not last or number):
            continue
        yield from _pieces(document, ends=ends if last else True)


def _pieces(document: bytes, *, ends: bool) -> Iterator[Document]:
    file, size, start = io.BytesIO(document), len(document), 0
    while start < size:
        stop = _cut(file, min(start + PIECE_BYTES, size), size)
        piece = document[start:stop].decode("utf-8", "replace")
        yield Document(piece, ends and stop == size)
        start = stop


def _unpacked(path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], gzip.open(path))
        case ".bz2":
            return bz2.open(path)
        case ".xz":
            return lzma.open(path)
        case _:
            opened = path.open("rb")
            reader = (
                library("zstandard")
                .ZstdDecompressor()
                .stream_reader(opened, read_across_frames=True, closefd=True)
            )
            return io.BufferedReader(reader)


def _parquet(path: Path) -> Any:
    module = library("pyarrow.parquet")
    try:
        return module.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path} is no Parquet file: {error}") from error


def _parquet_batches(stretch: FilePart, column: str) -> Iterator[Any]:
    file = _parquet(stretch.path)
    names = set(file.schema_arrow.names)
    wanted = [n for n in (column, "messages", "prompt", "completion") if n in names]
    if column in names:
        wanted = [column]
    if not wanted:
        known = shorten(sorted(names))
        raise DataError(f"{stretch.path} has no column {column!r}; --column can be one of {known}")
    yield from file.iter_batches(
        row_groups=list(range(stretch.start, stretch.stop)), columns=wanted
    )


def _arrow_batches(path: Path) -> Iterator[Any]:
    arrow = library("pyarrow")
    with arrow.memory_map(str(path)) as source:
        try:
            yield from arrow.ipc.open_stream(source)
        except arrow.ArrowInvalid:
            opened = arrow.ipc.open_file(source)
            for number in range(opened.num_record_batches):
                yield opened.get_batch(number)


def _require_plain_order(file: Path) -> None:
    state = file.parent / "state.json"
    if not state.is_file():
        return
    said = json.loads(state.read_text(encoding="utf-8"))
    if said.get("_indices_files") or said.get("_indices_data_files"):
        raise UsageError(
            f"{file.parent} is a selection of rows that lie elsewhere; save it again after "
            "flatten_indices()"
        )


def _rows(batches: Iterator[Any], path: Path, column: str) -> Iterator[Document]:
    for batch in batches:
        for row in batch.to_pylist():
            yield Document(_value(row, path, column))
