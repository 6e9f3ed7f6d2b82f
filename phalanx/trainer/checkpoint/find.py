"""Choose the newest checkpoint that can be trusted; set aside those that cannot."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.disk import hash_file
from phalanx.trainer.checkpoint.index import check_cover, group
from phalanx.trainer.checkpoint.manifest import (
    DamagedError,
    Manifest,
    read_manifest,
    unreadable,
)
from phalanx.trainer.checkpoint.names import MANIFEST, REPLACED, step_name, steps
from phalanx.trainer.checkpoint.read import Checkpoint

_HASHERS = 8  # files hashed at a time, if there are as many cores


def newest(directory: Path, on_event: Callable[[str], None]) -> Checkpoint | None:
    """Open the newest checkpoint of which every byte is as it was written.

    One that is not is renamed to `corrupt-...`, and the one before it is tried. Only one rank may
    call this; the others open the path it found.

    Args:
        directory: where checkpoints live; it need not exist.
        on_event: told, in one sentence, of each checkpoint that was set aside.

    Returns:
        The checkpoint, or None if there is none.

    Raises:
        CheckpointError: one is intact but from another version, or may not be read.
    """
    for _, path in steps(directory):
        try:
            return Checkpoint(path, verify(path))
        except DamagedError as error:
            set_aside(path, str(error), on_event)
    return None


def verify(path: Path, *, hashes: bool = True) -> Manifest:
    """Prove that a checkpoint is complete and is what was written.

    Args:
        path: of the checkpoint.
        hashes: read every byte; otherwise only the manifest and the sizes of the files.

    Returns:
        What it holds.

    Raises:
        DamagedError: saying what is wrong with which file.
        CheckpointError: it is from another version of Phalanx, or may not be read.
    """
    manifest = read_manifest(path)
    if step_name(manifest.step) != path.name.removesuffix(REPLACED):
        raise DamagedError(f"{MANIFEST} is of step {manifest.step}")
    try:
        _verify_sizes(path, manifest)
        if hashes:
            _verify_hashes(path, manifest)
        check_cover(group(manifest.stored))
    except DamagedError:
        raise
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        raise unreadable(error) from error
    return manifest


def set_aside(path: Path, reason: str, on_event: Callable[[str], None]) -> None:
    """Rename a damaged checkpoint so that nothing loads it and nothing deletes it."""
    aside = path.with_name(f"corrupt-{path.name}")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"corrupt-{path.name}-{count}")
    try:
        path.rename(aside)
        on_event(f"{path.name} is damaged: {reason}; set aside as {aside.name}")
    except OSError as error:
        on_event(f"{path.name} is damaged: {reason}; skipped ({error.strerror})")


def _verify_sizes(path: Path, manifest: Manifest) -> None:
    for name, written in manifest.files.items():
        size = (path / name).stat().st_size
        if size != written.bytes:
            raise DamagedError(f"{name} has {size} bytes instead of {written.bytes}")


def _verify_hashes(path: Path, manifest: Manifest) -> None:
    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1)) as pool:
        found = pool.map(hash_file, [path / name for name in manifest.files])
        for (name, written), sha256 in zip(manifest.files.items(), found, strict=True):
            if sha256 != written.sha256:
                raise DamagedError(f"{name} does not match its sha256")
