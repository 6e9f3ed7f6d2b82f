"""The file of one rank: its pieces, copied to host memory and written in the safetensors format.

The format (https://huggingface.co/docs/safetensors, "Format"): eight bytes that say how long the
header is, little-endian; the header, JSON, which gives each tensor a dtype, a shape and a range
of bytes; then the bytes. It is written here, so that the bytes can be hashed on their way, a full
disk can be answered and fsync be called; it is read by the safetensors package.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.trainer.checkpoint.disk import CHUNK
from phalanx.trainer.checkpoint.header import WIDTHS
from phalanx.trainer.checkpoint.index import Stored
from phalanx.trainer.checkpoint.piece import Piece

_EXPONENTS = {
    "F64": 0x7FF0_0000_0000_0000,
    "F32": 0x7F80_0000,
    "BF16": 0x7F80,
    "F16": 0x7C00,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,  # which has no infinity
}
_AT_ONCE = 1 << 17  # elements, so that what is computed of them stays in a cache
ALIGNMENT = 8  # of the first byte of data in the file; at least the widest dtype


@dataclass(frozen=True, eq=False)
class Shard:
    """A snapshot of one rank's pieces: what its file will hold.

    Attributes:
        stored: where each piece lies in the file.
        header: the first bytes of the file.
        data: all bytes after the header (uint8, in host memory).
    """

    stored: tuple[Stored, ...]
    header: bytes
    data: torch.Tensor

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + len(self.data)

    def spoiled(self, known: Mapping[str, int] | None = None) -> str:
        """Which tensor holds a nan or an infinity, and how many; empty if none does.

        Args:
            known: how many may be there, by the label of a tensor.
        """
        counts: Counter[str] = Counter()
        values, start = self.data.numpy(), 0
        for entry in self.stored:
            stop = start + (entry.part.stop - entry.part.start) * WIDTHS[entry.dtype]
            counts[entry.label] += count_not_finite(values[start:stop], entry.dtype)
            start = stop
        for label, count in counts.items():
            if count > (known or {}).get(label, 0):
                are = "value is" if count == 1 else "values are"
                return f"{count:,} {are} nan or infinite in {label}"
        return ""

    def chunks(self) -> Iterator[memoryview]:
        """The whole file, in order."""
        yield memoryview(self.header)
        data = self.data.numpy().data
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]


def count_not_finite(data: NDArray[np.uint8], dtype: str) -> int:
    """How many elements are nan or infinite: those whose exponent is all ones.

    Args:
        data: the bytes of the elements.
        dtype: of the elements, in the words of safetensors; whole numbers are always finite.
    """
    if dtype not in _EXPONENTS:
        return 0
    word = np.dtype(f"u{WIDTHS[dtype]}")
    mask = word.type(_EXPONENTS[dtype])
    words, found = data.view(word), 0
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        found += int(np.count_nonzero((part & mask) == mask))
    return found


def buffer_for(pieces: Sequence[Piece]) -> torch.Tensor:
    """The memory that a snapshot of these pieces needs, each page touched once.

    The first save would pay for new pages, while training waits.
    """
    on_gpu = any(piece.data.is_cuda for piece in pieces)
    total = sum(piece.data.nbytes for piece in pieces)
    return torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu).zero_()


def snapshot(pieces: Sequence[Piece], file: str, buffer: torch.Tensor | None = None) -> Shard:
    """Copy `pieces` to host memory; training may change them as soon as this returns.

    Args:
        pieces: from any device; empty ones are left out.
        file: name of the file it will be written to.
        buffer: the data of an earlier snapshot, to be used again if its size is right.
    """
    # Widest elements first, so that each piece is aligned in the file as its dtype wants.
    ordered = sorted((p for p in pieces if len(p.data)), key=lambda p: -p.data.element_size())
    ends, total = [], 0
    for piece in ordered:
        total += piece.data.nbytes
        ends.append(total)
    on_gpu = any(piece.data.is_cuda for piece in ordered)
    if buffer is None or len(buffer) != total:
        buffer = buffer_for(ordered)
    for piece, end in zip(ordered, ends, strict=True):
        room = buffer[end - piece.data.nbytes : end].view(piece.data.dtype)
        room.copy_(piece.data.detach(), non_blocking=on_gpu)
    if on_gpu:
        torch.cuda.synchronize()
    stored = tuple(_stored(piece, file, k) for k, piece in enumerate(ordered))
    return Shard(stored, _header(ordered, stored, ends), buffer)


def _stored(piece: Piece, file: str, k: int) -> Stored:
    return Stored(
        name=piece.name,
        field=piece.field,
        dtype=piece.dtype,
        shape=piece.shape,
        part=piece.part,
        file=file,
        key=f"{piece.field}/{piece.name}#{k}",
    )


def _header(pieces: Sequence[Piece], stored: Sequence[Stored], ends: Sequence[int]) -> bytes:
    tensors: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for piece, entry, end in zip(pieces, stored, ends, strict=True):
        tensors[entry.key] = {
            "dtype": entry.dtype,
            "shape": [len(piece.data)],
            "data_offsets": [end - piece.data.nbytes, end],
        }
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
