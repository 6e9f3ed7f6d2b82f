"""Token files that do not say what their ids are: recognised by a header or an index, or refused.

| written by | what says so |
|---|---|
| llm.c | a header of 256 int32 in the file: 20240520 (uint16 ids) or 20240801 (uint32) |
| Megatron-LM | `NAME.idx` beside `NAME.bin`: width of an id, length of every sequence |
| datatrove, for nanotron | `NAME.ds.metadata` beside `NAME.ds`: bytes of an id in its first line |

A file of bare ids says nothing. Its ids are then as `data.token_dtype` says, and looked at: ids of
another width give themselves away.

Sources: llm.c `dev/data/data_common.py`; Megatron-LM `core/datasets/indexed_dataset.py`; datatrove
`pipeline/tokens/tokenizer.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, UsageError
from phalanx.core.run import Data

LLM_C = {20240520: "uint16", 20240801: "uint32"}
LLM_C_HEADER = 1024
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_HEADER = 34
MEGATRON_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
DATATROVE = {2: "uint16", 4: "uint32"}

# Widest first: bytes that can be read as wide ids below the vocabulary are wide ids.
_BY_WIDTH = ("int64", "uint32", "uint16", "uint8")
_LOOK_AT = 1 << 19  # bytes at either end
_ENOUGH = 32  # ids, to judge by
_HEADERS = (256, 512, 1024, 2048, 4096)  # bytes that headers of ids have


class Packing(NamedTuple):
    """How ids lie in a file.

    Attributes:
        dtype: of one id.
        offset: bytes before the first.
        said_by: who says so; empty where only `data.token_dtype` does.
    """

    dtype: str
    offset: int = 0
    said_by: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of one id."""
        return np.dtype(self.dtype).itemsize


def packing_of(path: Path, data: Data, vocab: int) -> Packing:
    """Find out how the ids of a raw file lie in it.

    Args:
        path: of the file.
        data: what the run says of it; an offset of its own stands over that of a header.
        vocab: ids of the model, to judge by.

    Raises:
        UsageError: nothing says what the ids are, or two things say something else.
        DataError: an index does not fit the file, or the ids are not what they are said to be.
    """
    found = _llm_c(path) or _megatron(path) or _datatrove(path)
    if found is None:
        if data.token_dtype == "auto":
            raise UsageError(_untold(path, data.offset, vocab))
        packing = Packing(data.token_dtype, data.offset)
    elif data.token_dtype in ("auto", found.dtype) or data.trust:
        dtype = found.dtype if data.token_dtype == "auto" else data.token_dtype
        packing = Packing(dtype, data.offset or found.offset, found.said_by)
    else:
        raise UsageError(
            f"data.token_dtype is {data.token_dtype}, and {found.said_by} says {found.dtype}; "
            "leave out data.token_dtype"
        )
    _require_whole_ids(path, packing)
    if not data.trust:
        _require_likely(path, packing, vocab)
    return packing


def _llm_c(path: Path) -> Packing | None:
    with path.open("rb") as file:
        head = file.read(12)
    if len(head) < 12 or path.stat().st_size < LLM_C_HEADER:
        return None
    magic = int(np.frombuffer(head, "<i4")[0])
    if magic not in LLM_C:
        return None
    return Packing(LLM_C[magic], LLM_C_HEADER, f"the header of {path.name} (llm.c)")


def _megatron(path: Path) -> Packing | None:
    index = path.with_suffix(".idx")
    if path.suffix != ".bin" or not index.is_file():
        return None
    with index.open("rb") as file:
        head = file.read(MEGATRON_HEADER)
    if not head.startswith(MEGATRON) or len(head) < MEGATRON_HEADER:
        return None
    dtype = MEGATRON_DTYPES.get(head[17])
    if dtype is None:
        kinds = ", ".join(MEGATRON_DTYPES.values())
        raise DataError(f"{index.name} says dtype code {head[17]}; ids can be {kinds}")
    sequences = int.from_bytes(head[18:26], "little")
    lengths = np.fromfile(index, "<i4", count=sequences, offset=MEGATRON_HEADER)
    promised = int(lengths.sum(dtype=np.int64)) * np.dtype(dtype).itemsize
    if len(lengths) != sequences or promised != path.stat().st_size:
        raise DataError(
            f"{index.name} is of {sequences:,} sequences with {promised:,} bytes, and {path.name} "
            f"has {path.stat().st_size:,}; one of the two is cut short or of another corpus"
        )
    return Packing(dtype, 0, f"{index.name} (Megatron-LM)")


def _datatrove(path: Path) -> Packing | None:
    """Ids had two bytes before the width was written down."""
    if path.suffix != ".ds":
        return None
    about = path.with_name(path.name + ".metadata")
    if not about.is_file():
        return None
    first = about.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    _, _, width = first.rpartition("|")
    size = int(width) if width.isdigit() else 2
    if size not in DATATROVE:
        raise DataError(f"{about.name} says {size} bytes per id; they can be 2 or 4")
    return Packing(DATATROVE[size], 0, f"{about.name} (datatrove)")


def _untold(path: Path, offset: int, vocab: int) -> str:
    likely = _likely(path, offset, vocab)
    hint = f"; its ids look like {likely}" if likely else ""
    return (
        f"{path.name} has neither a header nor an index that says what its ids are{hint}: "
        f"set data.token_dtype={likely or 'uint16, uint32, int32, int64 or uint8'}"
        + ("" if likely else ", and data.offset where a header comes first")
    )


def _require_whole_ids(path: Path, packing: Packing) -> None:
    size = path.stat().st_size - packing.offset
    if size < 0:
        raise DataError(
            f"{path.name} has {size + packing.offset:,} bytes, and data.offset skips "
            f"{packing.offset:,}; use a smaller one"
        )
    if size % packing.itemsize:
        fits = [name for name in ("uint8", "uint16") if size % np.dtype(name).itemsize == 0]
        raise DataError(
            f"{path.name} has {size:,} bytes, which is no whole number of {packing.dtype} tokens; "
            f"data.token_dtype can be {' or '.join(fits)}, or the file is cut short"
        )


def _require_likely(path: Path, packing: Packing, vocab: int) -> None:
    """Stop at ids of another width, or at a header read as ids, with what to set instead."""
    better = _likely(path, packing.offset, vocab)
    width = np.dtype(better).itemsize if better else 0
    unknown = _unknown_below(path, packing, vocab)
    if better and width > packing.itemsize:
        every = "every second id" if width == 2 * packing.itemsize else "most ids"
        raise DataError(
            f"read as {packing.dtype}, {every} of {path.name} would be 0 or nearly so: its ids "
            f"look like {better}. Set data.token_dtype={better}, or data.trust=true to read it so"
        )
    if unknown is None:
        return
    if unknown <= _HEADERS[-1] < path.stat().st_size:
        header = _header_bytes(path, packing, unknown)
        raise DataError(
            f"{path.name} has ids beyond model.vocab={vocab} in its first {unknown} bytes and "
            f"nowhere else, as a header has: set data.offset={packing.offset + header}"
        )
    if better and width < packing.itemsize and better != "uint8":
        raise DataError(
            f"read as {packing.dtype}, {path.name} has ids beyond model.vocab={vocab}; its ids "
            f"look like {better}: set data.token_dtype={better}"
        )


def _header_bytes(path: Path, packing: Packing, least: int) -> int:
    """How long a header is of which `least` bytes are seen: what follows in it is mostly zero."""
    ids = _read(path, packing, 0, _HEADERS[-1] // packing.itemsize)
    first = least // packing.itemsize
    sizes = [size for size in _HEADERS if size >= least]
    padded = [n for n in sizes if (ids[first : n // packing.itemsize] == 0).mean() > 0.9]
    return padded[-1] if padded else sizes[0]


def _likely(path: Path, offset: int, vocab: int) -> str:
    """The widest type by which all ids that are looked at lie in the vocabulary; or nothing."""
    for name in _BY_WIDTH:
        samples = list(_samples(path, Packing(name, offset)))
        enough = sum(len(ids) for ids in samples) >= _ENOUGH
        if enough and any(ids.any() for ids in samples) and all(map(_below(vocab), samples)):
            return name
    return ""


def _below(vocab: int) -> Any:
    return lambda ids: not len(ids) or (ids.min() >= 0 and ids.max() < vocab)


def _samples(path: Path, packing: Packing) -> Iterator[NDArray[Any]]:
    """Some ids from the beginning and from the middle."""
    size = path.stat().st_size - packing.offset
    if size % packing.itemsize:
        return
    count = _LOOK_AT // packing.itemsize
    yield _read(path, packing, 0, count)
    total = size // packing.itemsize
    if total > count:
        yield _read(path, packing, max(total // 2, count), count)


def _read(path: Path, packing: Packing, first: int, count: int) -> NDArray[Any]:
    where = packing.offset + first * packing.itemsize
    return np.fromfile(path, packing.dtype, count=count, offset=where)


def _unknown_below(path: Path, packing: Packing, vocab: int) -> int | None:
    """Before which byte all unknown ids lie that are looked at; None where there are none."""
    last = None
    for number, ids in enumerate(_samples(path, packing)):
        (places,) = np.nonzero((ids < 0) | (ids >= vocab))
        if len(places):
            last = (int(places[-1]) + 1) * packing.itemsize + number * _LOOK_AT
    return last
