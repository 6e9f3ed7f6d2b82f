"""Whether all ranks see the folder that the run is written to: found out at the start.

Each machine with a folder of its own would save, and only the first resume would notice.
"""

import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.errors import PhalanxError, RefusedError, shorten
from phalanx.trainer.parallel.mesh import Mesh
from phalanx.trainer.run.meter import from_rank_0

PATIENCE = 10.0  # seconds; a network file system shows new files late
AT_HAND = 0.2  # on one machine
POLL = 0.05


def require_shared(folder: Path, attempt: str, mesh: Mesh, patience: float = PATIENCE) -> None:
    """Refuse ranks that write elsewhere than rank 0 looks; every rank calls it.

    Args:
        folder: of the checkpoints; it is made if it is missing.
        attempt: the same on all ranks, and never used before.
        mesh: all ranks.
        patience: seconds to wait until the files of others show up.

    Raises:
        RefusedError: naming the ranks.
        PhalanxError: the folder cannot be written.
    """
    world = mesh.world.size
    if world == 1:
        return
    rank = dist.get_rank()
    mine = folder / _name(attempt, rank)
    failed = torch.zeros((), device=mesh.device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.write_bytes(b"")
    except OSError:
        failed += rank + 1
    mesh.world.all_reduce(failed, "shared folder", largest=True).wait()
    unseen: object = []
    if not failed.item():
        found = [] if rank else _unseen(folder, attempt, world, patience)
        unseen = from_rank_0(found, mesh)
    with suppress(OSError):
        mine.unlink(missing_ok=True)
        for old in folder.glob(".*.rank-*") if rank == 0 else ():
            if not old.name.startswith(f".{attempt}."):  # of a start that was killed here
                old.unlink(missing_ok=True)
    if failed.item():
        raise PhalanxError(
            f"rank {int(failed.item()) - 1} cannot write {folder}; permit it there, or choose "
            "another --runs-dir"
        )
    if isinstance(unseen, list) and unseen:
        raise RefusedError(
            f"what ranks {shorten(unseen)} write to {folder} is not seen by rank 0; give "
            "--runs-dir a folder that all machines share"
        )


def _unseen(folder: Path, attempt: str, world: int, patience: float) -> list[int]:
    """Ranks whose files do not show up, however long one waits."""
    missing = list(range(world))
    deadline = time.monotonic() + patience
    while True:
        there = {path.name for path in folder.iterdir()}
        missing = [rank for rank in missing if _name(attempt, rank) not in there]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(POLL)


def _name(attempt: str, rank: int) -> str:
    return f".{attempt}.rank-{rank:05d}"
