"""The steps of a save: every rank writes its part, rank 0 proves the whole and commits it."""

import errno
import json
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.core.errors import CheckpointError
from phalanx.trainer import faults
from phalanx.trainer.checkpoint.agreement import Save
from phalanx.trainer.checkpoint.check import set_aside, verify
from phalanx.trainer.checkpoint.disk import Written, write_file
from phalanx.trainer.checkpoint.index import Stored, check_cover, group
from phalanx.trainer.checkpoint.manifest import DamagedError, Manifest
from phalanx.trainer.checkpoint.names import MANIFEST, shard_name, ticket_name
from phalanx.trainer.checkpoint.shard import Shard


def write_part(save: Save, shard: Shard) -> None:
    """Write this rank's shard, then the ticket that says it is complete and durable.

    Args:
        save: of this rank.
        shard: its snapshot.

    Raises:
        CheckpointError: another rank has failed.
        OSError: the disk has, or the file came out shorter than the shard.
    """
    save.check()
    save.disk.make_directory(save.partial)
    path = save.partial / shard_name(save.rank)
    written = write_file(save.disk, path, _watched(save, shard))
    if written.bytes != shard.bytes:
        raise OSError(errno.EIO, f"{path.name} took {written.bytes} of {shard.bytes} bytes")
    faults.point("save.written", step=save.step)
    ticket = {**written._asdict(), "pieces": [stored.to_json() for stored in shard.stored]}
    draft = save.partial / f"rank-{save.rank:05d}.draft"
    write_file(save.disk, draft, [memoryview(json.dumps(ticket).encode())])
    save.disk.rename(draft, save.partial / ticket_name(save.rank))


def commit(
    save: Save, state: dict[str, Any], on_event: Callable[[str], None] = lambda _: None
) -> None:
    """Rank 0: wait for every part, check the whole, and give it its final name, all or nothing.

    A checkpoint never changes. Of a step that is there already, only the same tensors are taken.

    Args:
        save: of this rank.
        state: small values that JSON gives back unchanged.
        on_event: told if one of that step was there, and damaged.

    Raises:
        CheckpointError: a rank has failed or does not answer, the parts do not make a whole, or
            the step is there with other values.
        OSError: the disk has failed.
    """
    save.wait_until(lambda: not _missing(save), lambda: f"no part from rank {_missing(save)[0]}")
    manifest = _collect(save, state)
    check_cover(group(manifest.stored))
    disk, text = save.disk, memoryview(manifest.encode())
    write_file(disk, save.partial / MANIFEST, [text])
    for rank in range(save.world):
        disk.remove(save.partial / ticket_name(rank))
    disk.sync_directory(save.partial)
    faults.point("save.commit", step=save.step)
    if save.final.exists() and _holds_the_same(save, manifest, on_event):
        save.discard(save.partial)
        return
    disk.rename(save.partial, save.final)


def _holds_the_same(save: Save, manifest: Manifest, on_event: Callable[[str], None]) -> bool:
    """Whether the step was saved before, with the same tensors; a damaged one is set aside."""
    try:
        before = verify(save.final)
    except DamagedError as error:
        set_aside(save.final, str(error), on_event)
        return False
    if (before.files, before.stored) != (manifest.files, manifest.stored):
        problem = (
            "it is there already, with other values, and a checkpoint never changes; give this "
            "run another --name, or move that checkpoint away"
        )
        raise CheckpointError(save.sentence(problem))
    return True


def _watched(save: Save, shard: Shard) -> Iterator[memoryview]:
    """The bytes of the shard, for as long as no rank has failed."""
    for chunk in shard.chunks():
        save.check()
        short = faults.point("save.write", step=save.step) == "short"
        yield chunk[: len(chunk) // 2] if short else chunk


def _missing(save: Save) -> list[int]:
    there = {path.name for path in save.partial.glob("rank-*.json")}
    return [rank for rank in range(save.world) if ticket_name(rank) not in there]


def _collect(save: Save, state: dict[str, Any]) -> Manifest:
    files: dict[str, Written] = {}
    stored: list[Stored] = []
    for rank in range(save.world):
        ticket = json.loads((save.partial / ticket_name(rank)).read_bytes())
        files[shard_name(rank)] = Written(ticket["bytes"], ticket["sha256"])
        stored += [Stored.from_json(row) for row in ticket["pieces"]]
    return Manifest(save.step, state, files, tuple(stored))
