"""Prove that a checkpoint is complete and is what was written; set aside one that is not.

Nothing here needs torch.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.disk import hash_file, plain_size
from phalanx.trainer.checkpoint.header import check_header
from phalanx.trainer.checkpoint.index import Stored, check_cover, group
from phalanx.trainer.checkpoint.manifest import (
    DamagedError,
    Manifest,
    read_manifest,
    unreadable,
)
from phalanx.trainer.checkpoint.names import MANIFEST, step_of, steps

_HASHERS = 8  # files hashed at a time, if there are as many cores

Check = Callable[[Manifest], None]


def accept(manifest: Manifest) -> None:
    """Ask nothing more of a checkpoint than that it is what was written."""


def verify(path: Path, *, hashes: bool = True, check: Check = accept) -> Manifest:
    """Prove that a checkpoint is complete and is what was written.

    Args:
        path: of the checkpoint. Where its name says a step, it must be of that step.
        hashes: read every byte; otherwise only the manifest and the sizes of the files.
        check: raises DamagedError where what it says is not to be used.

    Returns:
        What it holds.

    Raises:
        DamagedError: saying what is wrong with which file.
        CheckpointError: it is from another version of Phalanx, or may not be read.
    """
    manifest = read_manifest(path)
    if step_of(path.name) not in (None, manifest.step):
        raise DamagedError(f"{MANIFEST} is of step {manifest.step}")
    check(manifest)
    try:
        _verify_sizes(path, manifest)
        check_cover(group(manifest.stored))
        if hashes:
            _verify_files(path, manifest)
    except DamagedError:
        raise
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        raise unreadable(error) from error
    return manifest


def intact_beside(path: Path, check: Check = accept) -> Path | None:
    """The newest checkpoint beside a damaged one that can be used in its place.

    Args:
        path: of the damaged one; it is left out itself.
        check: raises DamagedError where what a checkpoint says is not to be used.

    Returns:
        Its path, every byte read; None if there is none.
    """
    for _, other in steps(path.parent):
        if other.name == path.name:
            continue
        try:
            verify(other, check=check)
        except CheckpointError:
            continue
        return other
    return None


def set_aside(path: Path, reason: str, on_event: Callable[[str], None]) -> None:
    """Rename a damaged checkpoint so that nothing loads it and nothing deletes it.

    Args:
        path: of the checkpoint.
        reason: what is wrong with it, for the event.
        on_event: told its new name, which begins with `corrupt-`; or why it could not be renamed,
            since nothing is raised.
    """
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
        size = plain_size(path / name)
        if size != written.bytes:
            raise DamagedError(f"{name} has {size} bytes instead of {written.bytes}")


def _verify_files(path: Path, manifest: Manifest) -> None:
    held: dict[str, list[Stored]] = defaultdict(list)
    for entry in manifest.stored:
        held[entry.file].append(entry)

    def verify_file(name: str) -> bool:
        intact = hash_file(path / name) == manifest.files[name].sha256
        if intact:
            check_header(path / name, held[name])
        return intact

    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1)) as pool:
        for name, intact in zip(manifest.files, pool.map(verify_file, manifest.files), strict=True):
            if not intact:
                raise DamagedError(f"{name} does not match its sha256")
