"""Which checkpoints stay: the last few that verify, and nothing of a save that died."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.trainer.checkpoint.agreement import Save
from phalanx.trainer.checkpoint.disk import Disk
from phalanx.trainer.checkpoint.find import set_aside, verify
from phalanx.trainer.checkpoint.manifest import DamagedError
from phalanx.trainer.checkpoint.names import REPLACED, hidden, steps


def prune(save: Save, keep: int, trusted: set[Path], on_event: Callable[[str], None]) -> None:
    """Keep the checkpoint just saved and the ones before it, until `keep` verified ones stay.

    Args:
        save: the one just committed; later steps, if there are any, are left alone.
        keep: how many stay.
        trusted: checkpoints already hashed in this run, of which only sizes are looked at again;
            those verified here are added.
        on_event: told of each damaged checkpoint that was set aside.
    """
    trusted.add(save.final)
    kept = 0
    for step, path in steps(save.directory):
        if step > save.step:
            continue
        if kept >= keep or path.name == save.final.name + REPLACED:
            save.discard(path)
            continue
        try:
            verify(path, hashes=path not in trusted)
        except DamagedError as error:
            set_aside(path, str(error), on_event)
        else:
            trusted.add(path)
            kept += 1


def sweep_others(directory: Path, attempt: str, disk: Disk) -> None:
    """Delete what other attempts left half-done; ranks of this one may be writing already."""
    for other, _, path in hidden(directory):
        if other != attempt:
            with suppress(OSError):
                disk.remove_tree(path)


def sweep_own(save: Save) -> None:
    """Delete what earlier saves of this attempt left; after a commit no rank needs it."""
    for attempt, count, path in hidden(save.directory):
        if attempt == save.attempt and count < save.count:
            with suppress(OSError):
                save.disk.remove_tree(path)
