"""The checkpoints of a run as `phalanx.checkpoints` gives them: listed, verified, opened, compared.

Nothing here needs torch, and nothing is read from a file before it is known to be one of ours.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phalanx.core.errors import CheckpointError, UsageError
from phalanx.core.html import html_table
from phalanx.core.units import show_bytes
from phalanx.trainer.checkpoint.check import intact_beside, verify
from phalanx.trainer.checkpoint.index import group
from phalanx.trainer.checkpoint.manifest import DamagedError, Manifest, read_manifest
from phalanx.trainer.checkpoint.names import MANIFEST, step_of, steps
from phalanx.trainer.checkpoint.raw import RawTensors, numbers

SCHEMA = 1


class CheckpointInfo(NamedTuple):
    """One checkpoint of a run.

    Attributes:
        step: after how many optimizer steps it was taken.
        path: its folder.
        bytes: of its files.
        verified: whether every byte is as it was written; None where that was not asked for.
        layout: that it was saved under; it loads under any.
        problem: what is wrong with it; empty if nothing is known to be.
    """

    step: int
    path: str
    bytes: int
    verified: bool | None
    layout: str
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """One entry of the document."""
        return self._asdict()


@dataclass(frozen=True)
class CheckpointList:
    """What `phalanx.checkpoints` gives.

    Attributes:
        directory: where they are.
        checkpoints: newest first.
        set_aside: folders beside them that no run goes on from: damaged, stale or abandoned.

    Example:
        >>> import phalanx
        >>> found = phalanx.checkpoints(tmp_path, verified=True)
        >>> [(one.step, one.verified) for one in found.checkpoints], found.passed
        ([], True)
    """

    directory: str
    checkpoints: tuple[CheckpointInfo, ...]
    set_aside: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether none is known to be damaged."""
        return all(found.verified is not False for found in self.checkpoints)

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx checkpoints --json` prints."""
        return {
            "schema": SCHEMA,
            "directory": self.directory,
            "checkpoints": [found.to_dict() for found in self.checkpoints],
            "set_aside": list(self.set_aside),
        }

    def _repr_html_(self) -> str:
        """The list as a table, for a notebook."""
        rows = [
            (c.step, show_bytes(c.bytes, binary=True), c.layout, c.problem or c.verified)
            for c in self.checkpoints
        ]
        return html_table(self.directory, rows, ("step", "size", "layout", "verified"))


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint: `field` says what is kept of the parameter `name`."""

    name: str
    field: str
    dtype: str
    shape: tuple[int, ...]
    files: int


@dataclass(frozen=True)
class CheckpointContents:
    """What is inside a checkpoint that has been verified.

    Attributes:
        info: of the checkpoint.
        state: everything that is not a tensor: how far the run was, and what decides which tokens
            come next.
        samples: sequences that were learned from before it.
        tensors: by name and field.
    """

    info: CheckpointInfo
    state: Mapping[str, Any]
    samples: int
    tensors: tuple[TensorInfo, ...]

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx checkpoints --show STEP --json` prints."""
        return {
            "schema": SCHEMA,
            "checkpoints": [self.info.to_dict()],
            "samples": self.samples,
            "state": dict(self.state),
            "tensors": [{**t._asdict(), "shape": list(t.shape)} for t in self.tensors],
        }


class TensorChange(NamedTuple):
    """One tensor in which two checkpoints differ.

    Attributes:
        name, field: of the tensor.
        difference: in words, such as its shapes; empty where only values differ.
        changed, elements: how many of its elements are others, of how many.
        max_difference: largest distance of two values; None where there is no number for it.
    """

    name: str
    field: str
    difference: str
    changed: int
    elements: int
    max_difference: float | None


@dataclass(frozen=True)
class CheckpointDifference:
    """How two checkpoints differ, both verified.

    Attributes:
        first, second: the two.
        state: values that differ, by key: before and after; a missing one is None.
        tensors: those that differ.
        compared: how many tensors both hold.
    """

    first: CheckpointInfo
    second: CheckpointInfo
    state: Mapping[str, tuple[Any, Any]]
    tensors: tuple[TensorChange, ...]
    compared: int

    @property
    def equal(self) -> bool:
        """Whether all tensors are the same, bit for bit; the layout does not matter."""
        return not self.tensors

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx checkpoints --diff A B --json` prints."""
        return {
            "schema": SCHEMA,
            "equal": self.equal,
            "checkpoints": [self.first.to_dict(), self.second.to_dict()],
            "compared": self.compared,
            "state": {key: list(values) for key, values in self.state.items()},
            "tensors": [change._asdict() for change in self.tensors],
        }


def checkpoints(run: str | Path, *, verified: bool = False) -> CheckpointList:
    """List the checkpoints of a run, newest first.

    Args:
        run: its folder, or that of its checkpoints. It may be training.
        verified: read and hash every byte; else only what is wrong at first sight is found.

    Returns:
        Each with step, bytes, layout and whether it is intact.

    Raises:
        UsageError: there is no such folder.

    Example:
        >>> import phalanx
        >>> phalanx.checkpoints(tmp_path).checkpoints
        ()
    """
    folder = _folder(Path(run))
    looked_at = [(path, _looked_at(path, hashes=verified)) for _, path in steps(folder)]
    found = tuple(info for path, info in looked_at if path.exists())  # a run may have deleted it
    rest = folder.iterdir() if folder.is_dir() else ()
    aside = sorted(p.name for p in rest if p.is_dir() and step_of(p.name.partition("-")[2]))
    return CheckpointList(str(folder), found, tuple(aside))


def show_checkpoint(run: str | Path, step: str) -> CheckpointContents:
    """What is inside one checkpoint, once every byte of it is verified.

    Args:
        run: the folder of the run.
        step: of the checkpoint, or its path.

    Raises:
        UsageError: there is none.
        CheckpointError: it is damaged.
    """
    path = _path(Path(run), step)
    manifest = _verified(path)
    tensors = tuple(
        TensorInfo(*key, held[0].dtype, held[0].shape, len({entry.file for entry in held}))
        for key, held in sorted(group(manifest.stored).items())
    )
    batch = manifest.state.get("batch", 0)
    return CheckpointContents(
        _info(path, manifest, verified=True),
        manifest.state,
        manifest.step * batch if isinstance(batch, int) else 0,
        tensors,
    )


def compare_checkpoints(run: str | Path, first: str, second: str) -> CheckpointDifference:
    """How two checkpoints differ, bit for bit, whatever layouts they were saved under.

    Args:
        run: the folder of the run.
        first: the step of one of its checkpoints, or the path of any.
        second: likewise.

    Raises:
        UsageError: there is no such checkpoint.
        CheckpointError: one is damaged.
    """
    paths = [_path(Path(run), each) for each in (first, second)]
    one, other = (_verified(path) for path in paths)
    a, b = (RawTensors(path, m) for path, m in zip(paths, (one, other), strict=True))
    keys = sorted(a.index.keys() | b.index.keys())
    changes = (_change(a, b, *key) for key in keys)
    return CheckpointDifference(
        _info(paths[0], one, verified=True),
        _info(paths[1], other, verified=True),
        {
            key: (one.state.get(key), other.state.get(key))
            for key in sorted(one.state.keys() | other.state.keys())
            if one.state.get(key) != other.state.get(key)
        },
        tuple(change for change in changes if change is not None),
        len(a.index.keys() & b.index.keys()),
    )


def _change(a: RawTensors, b: RawTensors, name: str, field: str) -> TensorChange | None:
    key = (name, field)
    if key not in a.index or key not in b.index:
        missing = "second" if key in a.index else "first"
        return TensorChange(name, field, f"missing in the {missing}", 0, 0, None)
    one, other = a.index[key][0], b.index[key][0]
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        text = f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
        return TensorChange(name, field, text, 0, 0, None)
    left, right = a.words(*key), b.words(*key)
    differs = left != right
    changed = int(np.count_nonzero(differs))
    if not changed:
        return None
    before, after = (numbers(words[differs], one.dtype) for words in (left, right))
    largest = None
    if before is not None and after is not None:
        with np.errstate(invalid="ignore"):
            distance = float(np.abs(before - after).max())
        largest = distance if np.isfinite(distance) else None
    return TensorChange(name, field, "", changed, left.size, largest)


def _folder(run: Path) -> Path:
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder; give that of a run, such as runs/NAME")
    has_own = (run / "run.toml").exists() or (run / "checkpoints").is_dir()
    return run / "checkpoints" if has_own else run


def _path(run: Path, wanted: str) -> Path:
    """The checkpoint of a step, or the one at a path."""
    folder = _folder(run)
    if not wanted.isdecimal():
        if (Path(wanted) / MANIFEST).exists():
            return Path(wanted)
        raise UsageError(f"{wanted} is neither a step nor the folder of a checkpoint")
    known = steps(folder)
    for step, path in known:
        if step == int(wanted):
            return path
    have = ", ".join(str(step) for step, _ in reversed(known)) or "none yet"
    raise UsageError(f"{run} has no checkpoint of step {wanted}; it has {have}")


def _verified(path: Path) -> Manifest:
    try:
        return verify(path)
    except DamagedError as error:
        other = intact_beside(path)
        hint = "no other beside it is intact" if other is None else f"{other.name} is intact"
        raise DamagedError(f"{path}: {error}; {hint}") from error


def _looked_at(path: Path, *, hashes: bool) -> CheckpointInfo:
    try:
        return _info(path, verify(path, hashes=hashes), verified=True if hashes else None)
    except (CheckpointError, OSError) as error:
        size, layout = 0, ""
        with suppress(CheckpointError, OSError):
            size = sum(file.lstat().st_size for file in path.glob("*"))
            layout = str(read_manifest(path).state.get("layout", ""))
        return CheckpointInfo(step_of(path.name) or 0, str(path), size, False, layout, str(error))


def _info(path: Path, manifest: Manifest, *, verified: bool | None) -> CheckpointInfo:
    size = sum(file.bytes for file in manifest.files.values())
    size += (path / MANIFEST).stat().st_size
    layout = str(manifest.state.get("layout", ""))
    return CheckpointInfo(manifest.step, str(path), size, verified, layout)
