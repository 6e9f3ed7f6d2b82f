"""Which elements of a tensor a rank holds, as boxes and flat ranges: index arithmetic, no data.

Tensor parallelism gives a rank a box of the global tensor; data parallelism gives it a flat range
of the (row-major) box. Any such part can be copied into any other with a few strided copies.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.core.errors import CheckpointError


@dataclass(frozen=True)
class Region:
    """A rectangular region of a global tensor, given by its first element and its sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements lie in it."""
        return math.prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each dim, when the box is stored row by row."""
        return tuple(math.prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes)))

    def position(self, element: tuple[int, ...]) -> int:
        """Where the global `element` lies in the flattened box."""
        inside = (i - first for i, first in zip(element, self.offsets, strict=True))
        return sum(i * stride for i, stride in zip(inside, self.strides, strict=True))

    def intersect(self, other: "Region") -> "Region | None":
        """The elements that lie in both, or None."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self._ends, other._ends))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Region(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class FlatRange:
    """The elements `start` to `stop` (exclusive) of a flattened box."""

    box: Region
    start: int
    stop: int

    def blocks(self) -> Iterator[Region]:
        """Cut the range into at most 2 * dims - 1 boxes, each contiguous in the flattened box."""
        for offsets, sizes in _cut(self.box.sizes, self.start, self.stop):
            shifted = (a + b for a, b in zip(self.box.offsets, offsets, strict=True))
            yield Region(tuple(shifted), sizes)


def check_part(label: str, shape: tuple[int, ...], part: FlatRange) -> None:
    """Refuse a part that does not lie inside a tensor of this shape.

    Args:
        label: what the message calls the tensor.
        shape: of the whole tensor; empty for a scalar.
        part: of it.

    Raises:
        CheckpointError: the box has another number of dims or leaves the shape, or the range leaves
            the box.
    """
    offsets, sizes = part.box.offsets, part.box.sizes
    if not len(shape) == len(offsets) == len(sizes) or any(
        a < 0 or n < 0 or a + n > whole for a, n, whole in zip(offsets, sizes, shape, strict=True)
    ):
        raise CheckpointError(
            f"{label} has shape {shape}; a box of {sizes} at {offsets} does not lie inside it"
        )
    if not 0 <= part.start <= part.stop <= math.prod(sizes):
        raise CheckpointError(
            f"{label}: elements {part.start} to {part.stop} do not lie in a box of {sizes}, "
            f"which has {math.prod(sizes)}"
        )


class Move(NamedTuple):
    """One strided copy between two flat tensors, each holding one part.

    `source` and `target` are the positions of its first element in the two tensors.
    """

    sizes: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]

    @property
    def source_stop(self) -> int:
        """One past the last position read."""
        reach = zip(self.sizes, self.source_strides, strict=True)
        return self.source + sum((n - 1) * stride for n, stride in reach) + 1


def moves(source: FlatRange, target: FlatRange) -> Iterator[Move]:
    """The copies that bring every element which both parts hold from `source` to `target`.

    Each shared element is moved exactly once. Parts of the same box share one contiguous run.

    Args:
        source: what a first flat tensor holds.
        target: what a second one is to hold, of the same global tensor.

    Returns:
        Copies whose positions count elements from the start of each part.
    """
    if source.box == target.box:
        source, target = _flat(source), _flat(target)
    if source.box.intersect(target.box) is None:
        return
    for have in source.blocks():
        for want in target.blocks():
            shared = have.intersect(want)
            if shared is not None:
                yield Move(
                    sizes=shared.sizes,
                    source=source.box.position(shared.offsets) - source.start,
                    source_strides=source.box.strides,
                    target=target.box.position(shared.offsets) - target.start,
                    target_strides=target.box.strides,
                )


def _flat(part: FlatRange) -> FlatRange:
    return FlatRange(Region((0,), (part.box.elements,)), part.start, part.stop)


def _cut(
    sizes: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes): the end of a first row, then whole rows, then part of a last row."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row  # whole rows are first to last - 1
    if first > last:
        yield from _cut_row(sizes, last, start, stop)
        return
    yield from _cut_row(sizes, first - 1, start, first * row)
    if first < last:
        yield (first,) + (0,) * (len(sizes) - 1), (last - first, *sizes[1:])
    yield from _cut_row(sizes, last, last * row, stop)


def _cut_row(
    sizes: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = index * math.prod(sizes[1:])
    for offsets, inner in _cut(sizes[1:], start - before, stop - before):
        yield (index, *offsets), (1, *inner)
