"""Which checkpoints stay: the last few that verify, milestones, nothing of a save that died."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from phalanx.trainer.checkpoint.agreement import Save
from phalanx.trainer.checkpoint.check import set_aside, verify
from phalanx.trainer.checkpoint.disk import Disk
from phalanx.trainer.checkpoint.manifest import DamagedError
from phalanx.trainer.checkpoint.names import REPLACED, abandoned, hidden, steps


class Retention(NamedTuple):
    """How much of the past is kept.

    Attributes:
        last: how many verified checkpoints stay, counted from the newest.
        every: one whose step is a multiple of this stays for good; 0 has none.
    """

    last: int = 2
    every: int = 0

    def is_milestone(self, step: int) -> bool:
        """Whether the checkpoint of a step stays for good."""
        return bool(self.every) and step % self.every == 0


def prune(
    save: Save, retention: Retention, trusted: set[Path], on_event: Callable[[str], None]
) -> None:
    """Keep the checkpoint just saved, milestones, and others until enough verified ones stay.

    Args:
        save: the one just committed; later steps, if there are any, are left alone.
        retention: how many stay.
        trusted: checkpoints already hashed in this run, of which only sizes are looked at again;
            those verified here are added.
        on_event: told of each damaged checkpoint that was set aside.
    """
    trusted.add(save.final)
    kept = 0
    for step, path in steps(save.directory):
        if step > save.step:
            continue
        stays = retention.is_milestone(step) and not path.name.endswith(REPLACED)
        if path.name == save.final.name + REPLACED or (kept >= retention.last and not stays):
            save.discard(path)
            continue
        if kept >= retention.last:
            continue
        try:
            verify(path, hashes=path not in trusted)
        except DamagedError as error:
            set_aside(path, str(error), on_event)
        else:
            trusted.add(path)
            kept += 1
    if kept >= retention.last:
        for path in abandoned(save.directory):
            save.disk.remove_tree(path)


def sweep_others(directory: Path, attempt: str, disk: Disk) -> None:
    """Delete what other attempts left half-done; ranks of this one may be writing already.

    Args:
        directory: where checkpoints live.
        attempt: this one, whose own stay.
        disk: the file system; what it fails to delete is left.

    Raises:
        OSError: the directory cannot be listed.
    """
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
