"""Choose a checkpoint that can be trusted: the newest of a run, or the one that is asked for."""

from collections.abc import Callable
from pathlib import Path

from phalanx.trainer.checkpoint.check import Check, accept, intact_beside, set_aside, verify
from phalanx.trainer.checkpoint.manifest import DamagedError
from phalanx.trainer.checkpoint.names import steps
from phalanx.trainer.checkpoint.read import Checkpoint


def newest(
    directory: Path, on_event: Callable[[str], None], check: Check = accept
) -> Checkpoint | None:
    """Open the newest checkpoint of which every byte is as it was written.

    One that is not is renamed to `corrupt-...`, and the one before it is tried. Only one rank may
    call this; the others open the path it found.

    Args:
        directory: where checkpoints live; it need not exist.
        on_event: told, in one sentence, of each checkpoint that was set aside.
        check: raises DamagedError where what a checkpoint says is not to be used.

    Returns:
        The checkpoint, or None if there is none.

    Raises:
        CheckpointError: one is intact but from another version, or may not be read.
    """
    for _, path in steps(directory):
        try:
            return Checkpoint(path, verify(path, check=check))
        except DamagedError as error:
            set_aside(path, str(error), on_event)
    return None


def open_verified(path: Path, check: Check = accept) -> Checkpoint:
    """Open the checkpoint that somebody asks for by name, if every byte is as it was written.

    Args:
        path: of the checkpoint, wherever it was copied to.
        check: raises DamagedError where what it says is not to be used.

    Raises:
        DamagedError: saying what is wrong, and which one beside it can be used.
        CheckpointError: it is from another version, or may not be read.
    """
    try:
        return Checkpoint(path, verify(path, check=check))
    except DamagedError as error:
        other = intact_beside(path, check)
        hint = "no other beside it is intact" if other is None else f"use {other}, which is intact"
        raise DamagedError(f"{path}: {error}; {hint}") from error
