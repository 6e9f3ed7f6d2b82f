"""Read a checkpoint under any layout, whatever layout wrote it."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.box import Move, moves
from phalanx.trainer.checkpoint.index import Stored, group
from phalanx.trainer.checkpoint.manifest import DamagedError, Manifest, read_manifest
from phalanx.trainer.checkpoint.piece import DTYPES, Piece

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Checkpoint:
    """An open checkpoint; use it in a `with` block, or close it.

    Files are mapped into memory when a piece needs them, and only what it needs is read.

    Attributes:
        path: its directory.
        step: after how many optimizer steps it was taken.
        state: what rank 0 gave to `Saver.save`.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.step = manifest.step
        self.state: dict[str, Any] = manifest.state
        self._index = group(manifest.stored)
        self._files: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Open a checkpoint that `newest` has found, without reading all of it again.

        Raises:
            CheckpointError: it is not there, or its manifest is damaged.
        """
        try:
            return cls(path, read_manifest(path))
        except DamagedError as error:
            raise DamagedError(f"{path}: {error}") from error

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        while self._files:
            self._files.popitem()[1].__exit__(None, None, None)

    def names(self) -> list[str]:
        """All parameters it holds, sorted."""
        return sorted({name for name, _ in self._index})

    def fields(self, name: str) -> list[str]:
        """What is kept about parameter `name`, sorted; empty if there is no such parameter."""
        return sorted(field for known, field in self._index if known == name)

    def read(self, pieces: Iterable[Piece]) -> None:
        """Fill the data of each piece with the bits that were saved.

        Raises:
            CheckpointError: no such parameter or field (with the nearest names), or another
                shape or dtype (with both).
            DamagedError: the files do not hold what the manifest promises.
        """
        for piece in pieces:
            stored = self._stored(piece.name, piece.field)
            self._check_same(stored[0], piece)
            filled = sum(self._copy(source, piece) for source in stored)
            if filled != len(piece.data):
                raise DamagedError(
                    f"{self.path}: {piece.label}: only {filled} of {len(piece.data)} elements found"
                )

    def tensor(self, name: str, field: str = "weight") -> torch.Tensor:
        """One whole global tensor, in host memory.

        Args:
            name: global parameter name.
            field: what is kept about it: "weight", "exp_avg", ...

        Returns:
            Of the global shape, in the dtype that was saved.

        Raises:
            CheckpointError: no such parameter or field, with the nearest names.
            DamagedError: the files do not hold what the manifest promises.
        """
        first = self._stored(name, field)[0]
        whole = torch.empty(first.shape, dtype=_TORCH_DTYPES[first.dtype])
        data, origin = whole.view(-1), (0,) * len(first.shape)
        self.read([Piece(name, field, first.shape, origin, first.shape, 0, len(data), data)])
        return whole

    def _stored(self, name: str, field: str) -> Sequence[Stored]:
        if (name, field) in self._index:
            return self._index[name, field]
        if kept := self.fields(name):
            raise CheckpointError(
                f"{self.path} holds no {field!r} of {name}; it holds {', '.join(kept)}"
            )
        names = self.names()
        near = get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it holds {_some(names)}"
        raise CheckpointError(f"{self.path} holds no parameter {name!r}; {hint}")

    def _check_same(self, stored: Stored, piece: Piece) -> None:
        if stored.shape != piece.shape:
            raise CheckpointError(
                f"{piece.label} has shape {stored.shape} in {self.path} and {piece.shape} in this "
                f"run; a run resumes with the model it was started with"
            )
        if stored.dtype != piece.dtype:
            raise CheckpointError(
                f"{piece.label} is {stored.dtype} in {self.path} and {piece.dtype} in this run; "
                f"a run resumes with the precision it was started with"
            )

    def _copy(self, source: Stored, piece: Piece) -> int:
        """Copy what the two have in common; returns how many elements that is."""
        copied = 0
        for move in moves(source.part, piece.part):
            copied += _copy_bits(self._slice(source), move, piece.data)
        return copied

    def _slice(self, source: Stored) -> Any:
        try:
            if source.file not in self._files:
                self._files[source.file] = safe_open(self.path / source.file, framework="pt")
            found = self._files[source.file].get_slice(source.key)
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{self.path / source.file}: {error}") from error
        wanted = [source.part.stop - source.part.start]
        if found.get_shape() != wanted or found.get_dtype() != source.dtype:
            raise DamagedError(
                f"{self.path / source.file}: {source.key} is {found.get_dtype()} "
                f"{found.get_shape()}; the manifest says {source.dtype} {wanted}"
            )
        return found


def _copy_bits(source: Any, move: Move, target: torch.Tensor) -> int:
    have = source[move.source : move.source_stop].as_strided(move.sizes, move.source_strides)
    want = target[move.target :].as_strided(move.sizes, move.target_strides)
    want.copy_(have)
    return want.numel()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
