"""The header of a shard, read without torch: that it holds what the manifest says it holds.

A hash proves that bytes are those that were written; this, that a reader will make of them what the
writer meant, also where a program has written both.
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.trainer.checkpoint.disk import open_plain, plain_size
from phalanx.trainer.checkpoint.index import Stored, whole
from phalanx.trainer.checkpoint.manifest import DamagedError, shorter, strict_json

WIDTHS = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "U8": 1,
}  # bytes of an element
MOST_HEADER_BYTES = 100_000_000  # what the safetensors package reads at most


def check_header(path: Path, stored: Iterable[Stored]) -> None:
    """Prove that a shard holds each of its pieces, whole, one after the other and nothing else.

    Args:
        path: of the shard.
        stored: the pieces that lie in it, by the manifest.

    Raises:
        DamagedError: it does not.
        OSError: it cannot be read.
    """
    try:
        table, room = _read(path)
        wanted = {entry.key: entry for entry in stored}
        ranges = sorted(_range(key, row, wanted.pop(key)) for key, row in table.items())
        if wanted:
            raise ValueError(f"{next(iter(wanted))} is not in it")
        edges = [(0, 0), *ranges, (room, room)]
        if any(before != start for (_, before), (start, _) in pairwise(edges)):
            raise ValueError("its tensors do not fill it, each byte once")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"the header of {path.name}: {shorter(repr(error))}") from error


def data_ranges(path: Path) -> dict[str, NDArray[np.uint8]]:
    """The bytes of every tensor of a shard that has been verified, by key; the file is mapped."""
    table, room = _read(path)
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=plain_size(path) - room) if room else ()
    return {key: np.asarray(data[slice(*row["data_offsets"])]) for key, row in table.items()}


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """What a header says of each tensor, and how many bytes follow it."""
    size = plain_size(path)
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"its length is {length:,}, in a file of {size:,} bytes")
        table = strict_json(file.read(length))
    return {key: row for key, row in table.items() if key != "__metadata__"}, size - 8 - length


def _range(key: str, row: dict[str, Any], entry: Stored) -> tuple[int, int]:
    """The bytes of one tensor, if it is what the manifest says."""
    elements = entry.part.stop - entry.part.start
    start, stop = (whole(value) for value in row["data_offsets"])
    if row["dtype"] != entry.dtype or row["shape"] != [elements]:
        raise ValueError(
            f"{key} is {row['dtype']} {row['shape']}; the manifest says {entry.dtype} [{elements}]"
        )
    if stop - start != elements * WIDTHS[entry.dtype]:
        raise ValueError(f"{key} has {stop - start} bytes for {elements} of {entry.dtype}")
    return start, stop
