"""How fast is a checkpoint? Compares it with writing the same bytes to a plain file.

    python benchmarks/checkpoint_speed.py --mib 256 --ranks 2

Each line is the median of several rounds, taken in turn; writing includes fsync. The ratio is the
time to commit a checkpoint over the time to write and sync the plain file.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from phalanx.trainer.checkpoint import Piece, Saver, newest

CHUNK = 8 << 20  # bytes per write of the plain file, as many as a checkpoint writes at a time
PLAIN, HASHED = "plain file", "plain file, then sha256"
COPY, COMMIT = "copy (training waits)", "checkpoint, committed"
VERIFY, READ = "verify, all hashes", "read back"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the checkpoint in MiB")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that write at the same time")
    parser.add_argument("--tensors", type=int, default=64, help="pieces per rank")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one if absent")
    args = parser.parse_args()
    ranks = make_pieces(args.mib << 20, args.ranks, args.tensors)
    root = Path(tempfile.mkdtemp(prefix="checkpoint-speed-", dir=args.directory))
    try:
        seconds = measure(root, ranks, args.rounds)
    finally:
        shutil.rmtree(root)
    print(
        f"{args.mib} MiB of fp32, {args.ranks} ranks, {args.tensors} pieces each, in {root.parent}"
    )
    for name, value in seconds.items():
        print(f"{name:24} {value:7.3f} s  {args.mib / 1024 / value:6.2f} GiB/s")
    print(f"ratio {seconds[COMMIT] / seconds[PLAIN]:.2f}")


def make_pieces(size: int, ranks: int, tensors: int) -> list[list[Piece]]:
    """`size` bytes of fp32: so many tensors, each cut evenly over the ranks."""
    count = size // 4 // ranks // tensors
    whole = (count * ranks,)

    def piece(tensor: int, rank: int) -> Piece:
        start = rank * count
        data = torch.rand(count)
        return Piece(f"w{tensor}", "weight", whole, (0,), whole, start, start + count, data)

    return [[piece(tensor, rank) for tensor in range(tensors)] for rank in range(ranks)]


def measure(root: Path, ranks: Sequence[Sequence[Piece]], rounds: int) -> dict[str, float]:
    """Median seconds of everything that is compared."""
    world = len(ranks)
    savers = [
        Saver(root / "checkpoints", rank, world, keep=rounds + 1, attempt="benchmark")
        for rank in range(world)
    ]
    plain = torch.cat([piece.data for pieces in ranks for piece in pieces]).numpy().tobytes()
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        seconds[name].append(time.perf_counter() - start)

    def checkpoint(step: int) -> None:
        start = time.perf_counter()
        timed(COPY, lambda: save_all(savers, ranks, step))
        for saver in savers:
            saver.wait()
        seconds[COMMIT].append(time.perf_counter() - start)

    def plainly(name: str, step: int) -> None:
        path = root / f"{name}-{step}"
        timed(name, lambda: write_plainly(path, plain, sha256=name == HASHED))

    kinds = [partial(plainly, PLAIN), partial(plainly, HASHED), checkpoint]
    for step in range(rounds + 1):
        for kind in range(3):  # each kind comes first, second and third in turn
            kinds[(kind + step) % 3](step)
    for _ in range(rounds + 1):
        timed(VERIFY, lambda: newest(root / "checkpoints", print))
    found = newest(root / "checkpoints", print)
    if found is not None:
        with found:
            for _ in range(rounds + 1):
                timed(READ, lambda: [found.read(pieces) for pieces in ranks])
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def save_all(savers: Sequence[Saver], ranks: Sequence[Sequence[Piece]], step: int) -> None:
    """Begin a save on all ranks."""
    for saver, pieces in zip(savers, ranks, strict=True):
        saver.save(step, pieces, {})


def write_plainly(path: Path, data: bytes, *, sha256: bool) -> None:
    """Write and sync a file, then hash what was written."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), CHUNK):
            file.write(memoryview(data)[start : start + CHUNK])
        os.fsync(file.fileno())
    if sha256:
        hashlib.sha256(data)


if __name__ == "__main__":
    main()
