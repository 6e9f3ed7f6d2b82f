"""The tensors of a checkpoint without torch: as the bits that they are, and as numbers."""

from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.box import FlatRange, Region, moves
from phalanx.trainer.checkpoint.header import WIDTHS, data_ranges
from phalanx.trainer.checkpoint.index import Index, Stored, group
from phalanx.trainer.checkpoint.manifest import Manifest

_FLOATS = {"F64": "f8", "F32": "f4", "F16": "f2"}


class RawTensors:
    """Reads tensors of a checkpoint that has been verified; only what is asked for is mapped.

    Attributes:
        index: what it holds, by (name, field).
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.index: Index = group(manifest.stored)
        self._data: dict[str, dict[str, NDArray[np.uint8]]] = {}

    def words(self, name: str, field: str) -> NDArray[np.unsignedinteger]:
        """A whole tensor as unsigned words, one for each element, in its own shape.

        Args:
            name: global parameter name.
            field: what is kept about it: "weight", "exp_avg", ...

        Returns:
            uint8, 16, 32 or 64, as wide as an element; a copy in host memory.

        Raises:
            CheckpointError: it has no such tensor.
        """
        stored = self.index.get((name, field))
        if stored is None:
            raise CheckpointError(f"{self.path} holds no {field} of {name}")
        shape = stored[0].shape
        whole = np.empty(shape, dtype=f"u{WIDTHS[stored[0].dtype]}")
        target = FlatRange(Region((0,) * len(shape), shape), 0, whole.size)
        for entry in stored:
            self._copy(entry, whole.reshape(-1), target)
        return whole

    def _copy(self, entry: Stored, flat: NDArray[np.unsignedinteger], target: FlatRange) -> None:
        if entry.file not in self._data:
            self._data[entry.file] = data_ranges(self.path / entry.file)
        held = self._data[entry.file][entry.key].view(flat.dtype)
        width = flat.itemsize
        for move in moves(entry.part, target):
            have = as_strided(
                held[move.source :], move.sizes, [s * width for s in move.source_strides]
            )
            want = as_strided(
                flat[move.target :], move.sizes, [s * width for s in move.target_strides]
            )
            want[...] = have


def numbers(words: NDArray[np.unsignedinteger], dtype: str) -> NDArray[np.float64] | None:
    """What the words of a tensor mean; None for a format that numpy does not have.

    Args:
        words: of any shape.
        dtype: in the words of safetensors.
    """
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in _FLOATS:
        return words.view(_FLOATS[dtype]).astype(np.float64)
    return None
