"""The index of a checkpoint: which file holds which elements, and that no element is missing."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.box import FlatRange, Region, check_part
from phalanx.trainer.checkpoint.names import KEY, WORD


@dataclass(frozen=True)
class Stored:
    """Where one piece lies: a tensor named `key` in the safetensors file `file`."""

    name: str
    field: str
    dtype: str
    shape: tuple[int, ...]
    part: FlatRange
    file: str
    key: str

    @property
    def label(self) -> str:
        """How messages call the tensor it belongs to."""
        return f"{self.field} of {self.name}"

    def to_json(self) -> dict[str, Any]:
        """The row that `from_json` reads back."""
        return {
            "name": self.name,
            "field": self.field,
            "dtype": self.dtype,
            "shape": self.shape,
            "offsets": self.part.box.offsets,
            "sizes": self.part.box.sizes,
            "start": self.part.start,
            "stop": self.part.stop,
            "file": self.file,
            "key": self.key,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Stored":
        """Read a row.

        Raises:
            CheckpointError: the part lies outside its tensor.
            KeyError, TypeError, ValueError: it is not such a row.
        """
        box = Region(_integers(row["offsets"]), _integers(row["sizes"]))
        stored = cls(
            name=matching(WORD, row["name"]),
            field=matching(WORD, row["field"]),
            dtype=matching(WORD, row["dtype"]),
            shape=_integers(row["shape"]),
            part=FlatRange(box, whole(row["start"]), whole(row["stop"])),
            file=matching(WORD, row["file"]),
            key=matching(KEY, row["key"]),
        )
        check_part(stored.label, stored.shape, stored.part)
        return stored


Index = dict[tuple[str, str], list[Stored]]


def group(stored: Iterable[Stored]) -> Index:
    """Collect what belongs to the same tensor, by (name, field)."""
    tensors: Index = defaultdict(list)
    for entry in stored:
        tensors[entry.name, entry.field].append(entry)
    return dict(tensors)


def check_cover(index: Index) -> None:
    """Prove that every element of every tensor is stored exactly once.

    The boxes of a tensor must be equal or apart, as they are when ranks split it along dims.

    Raises:
        CheckpointError: naming the tensor, the elements, and the files that disagree.
    """
    for entries in index.values():
        _check_agreement(entries)
        boxes: dict[Region, list[Stored]] = defaultdict(list)
        for entry in entries:
            boxes[entry.part.box].append(entry)
        for box, held in boxes.items():
            _check_ranges(box, sorted(held, key=lambda e: (e.part.start, e.part.stop)))
        _check_boxes(entries[0], list(boxes))


def _check_agreement(entries: Sequence[Stored]) -> None:
    first = entries[0]
    for entry in entries:
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{first.label} is {first.dtype} {first.shape} in {first.file} and "
                f"{entry.dtype} {entry.shape} in {entry.file}; ranks must agree"
            )


def _check_ranges(box: Region, entries: Sequence[Stored]) -> None:
    done, before = 0, entries[0]
    where = f"of the box of {box.sizes} at {box.offsets}"
    for entry in entries:
        start, stop = entry.part.start, entry.part.stop
        if start > done:
            raise CheckpointError(f"{entry.label}: nobody saves elements {done} to {start} {where}")
        if start < done:
            raise CheckpointError(
                f"{entry.label}: elements {start} to {min(done, stop)} {where} are saved twice, "
                f"in {before.file} and in {entry.file}; one rank must own them"
            )
        done, before = stop, entry
    if done < box.elements:
        raise CheckpointError(
            f"{before.label}: nobody saves elements {done} to {box.elements} {where}"
        )


def _check_boxes(first: Stored, boxes: Sequence[Region]) -> None:
    for one, other in combinations(boxes, 2):
        shared = one.intersect(other)
        if shared is not None:
            raise CheckpointError(
                f"{first.label}: the boxes of {one.sizes} at {one.offsets} and of {other.sizes} at "
                f"{other.offsets} overlap; ranks must split a tensor into boxes that lie apart"
            )
    whole = Region((0,) * len(first.shape), first.shape).elements
    saved = sum(box.elements for box in boxes)
    if saved != whole:
        raise CheckpointError(
            f"{first.label} has shape {first.shape}, {whole} elements; ranks save {saved} of them"
        )


def whole(value: object) -> int:
    """A whole number from a file, as it stands there.

    Raises:
        TypeError: it is another kind of value.
    """
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def matching(pattern: re.Pattern[str], value: object) -> str:
    """A text from a file that is all of a pattern.

    Args:
        pattern: that the whole text has to match.
        value: as JSON gave it.

    Raises:
        ValueError: it is no text, or does not match.
    """
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is no name")
    return value


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(whole(v) for v in values)
