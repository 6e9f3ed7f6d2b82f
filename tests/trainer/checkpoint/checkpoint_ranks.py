"""What the tests of checkpoints share: tensors cut into pieces, and ranks that save together."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from phalanx.trainer.checkpoint import Piece, Saver

Tensors = Mapping[tuple[str, str], torch.Tensor]


class Cut(NamedTuple):
    """Which part of a tensor one rank owns."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Cut]:
    """A random grid of boxes over the tensor, each cut into random flat ranges."""
    edges = [
        [0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))), n] if n > 1 else [0, 1]
        for n in shape
    ]
    boxes = product(*(list(pairwise(along)) for along in edges))
    found = []
    for box in boxes:
        offsets, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        count = torch.Size(sizes).numel()
        inner = draw(st.lists(st.integers(0, count), max_size=2))
        found += [Cut(offsets, sizes, a, b) for a, b in pairwise([0, *sorted(inner), count])]
    return found


def piece(name: str, field: str, whole: torch.Tensor, cut: Cut) -> Piece:
    """The piece of `whole` that `cut` says, with its data."""
    box = whole[tuple(slice(a, a + n) for a, n in zip(cut.offsets, cut.sizes, strict=True))]
    data = box.reshape(-1)[cut.start : cut.stop].clone(memory_format=torch.contiguous_format)
    return Piece(name, field, tuple(whole.shape), *cut, data)


def split_evenly(tensors: Tensors, world: int) -> list[list[Piece]]:
    """Each rank owns an even range of every flattened tensor."""
    ranks: list[list[Piece]] = [[] for _ in range(world)]
    for (name, field), whole in tensors.items():
        bounds = [whole.numel() * rank // world for rank in range(world + 1)]
        for rank, (start, stop) in enumerate(pairwise(bounds)):
            cut = Cut((0,) * whole.dim(), tuple(whole.shape), start, stop)
            ranks[rank].append(piece(name, field, whole, cut))
    return ranks


def make_savers(directory: Path, world: int, attempt: str = "a", **options: object) -> list[Saver]:
    """One saver per rank, in one process."""
    ranks = range(world)
    return [Saver(directory, r, world, attempt=attempt, **options) for r in ranks]  # type: ignore[arg-type]


def save_all(savers: Sequence[Saver], step: int, ranks: Sequence[Sequence[Piece]]) -> None:
    """Save on all ranks, the last one first, and wait until it is committed."""
    for saver, pieces in reversed(list(zip(savers, ranks, strict=True))):
        saver.save(step, pieces, {"step": step})
    for saver in savers:
        saver.wait()


def outcomes(savers: Sequence[Saver]) -> list[str]:
    """What each rank is told when it waits: the message of its error, or nothing."""
    return [_told(saver.wait) for saver in savers]


def _told(wait: Callable[[], None]) -> str:
    try:
        wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit, whatever number that is."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def reseal(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a manifest and give it a right checksum, as only a program can."""
    body, mark, _ = path.read_bytes().rpartition(b'"sha256": "')
    body = change(body)
    path.write_bytes(body + mark + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n')
