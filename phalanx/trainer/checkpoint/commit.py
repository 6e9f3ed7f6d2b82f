"""The steps of a save: every rank writes its part, rank 0 proves the whole and commits it."""

import json
from collections.abc import Iterator
from typing import Any

from phalanx.trainer.checkpoint.agreement import Save
from phalanx.trainer.checkpoint.disk import Written, write_file
from phalanx.trainer.checkpoint.index import Stored, check_cover, group
from phalanx.trainer.checkpoint.manifest import Manifest
from phalanx.trainer.checkpoint.names import MANIFEST, REPLACED, shard_name, ticket_name
from phalanx.trainer.checkpoint.shard import Shard


def write_part(save: Save, shard: Shard) -> None:
    """Write this rank's shard, then the ticket that says it is complete and durable.

    Raises:
        CheckpointError: another rank has failed.
        OSError: the disk has.
    """
    save.check()
    save.disk.make_directory(save.partial)
    written = write_file(save.disk, save.partial / shard_name(save.rank), _watched(save, shard))
    ticket = {**written._asdict(), "pieces": [stored.to_json() for stored in shard.stored]}
    draft = save.partial / f"rank-{save.rank:05d}.draft"
    write_file(save.disk, draft, [memoryview(json.dumps(ticket).encode())])
    save.disk.rename(draft, save.partial / ticket_name(save.rank))


def commit(save: Save, state: dict[str, Any]) -> None:
    """Rank 0: wait for every part, check the whole, and give it its final name, all or nothing.

    Raises:
        CheckpointError: a rank has failed or does not answer, or the parts do not make a whole.
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
    if save.final.exists():  # saved by an earlier run, which went another way from here
        older = save.final.with_name(save.final.name + REPLACED)
        if older.exists():
            save.discard(older)
        disk.rename(save.final, older)  # still a checkpoint, should we die before the next line
    disk.rename(save.partial, save.final)


def _watched(save: Save, shard: Shard) -> Iterator[memoryview]:
    """The bytes of the shard, for as long as no rank has failed."""
    for chunk in shard.chunks():
        save.check()
        yield chunk


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
