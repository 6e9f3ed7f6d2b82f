"""When a save cannot go on: tell every rank why, and leave nothing half-written."""

import errno
import shutil
import time
from contextlib import suppress
from pathlib import Path

from phalanx.core.errors import CheckpointError
from phalanx.trainer.checkpoint.agreement import FIRST_POLL, UNSAID, Save
from phalanx.trainer.checkpoint.disk import write_file
from phalanx.trainer.checkpoint.names import shard_name, ticket_name

GRACE = 10.0  # seconds that rank 0 gives the others to read why a save failed


def give_up(save: Save, error: Exception, needed: int) -> CheckpointError:
    """Make the save fail for all ranks, unless it has failed already.

    Never call it on a rank whose ticket is in place: from then on rank 0 decides.

    Args:
        save: the save that cannot go on.
        error: why.
        needed: bytes that this rank wanted to write.

    Returns:
        The error to raise, with the reason of the rank that failed first.
    """
    mine = "" if save.failed.exists() else _publish(save, error, needed)
    if not mine and not isinstance(error, FileNotFoundError):  # which only says that all is moved
        mine = explain(save, error, needed)
    reason = save.reason() or mine or save.sentence(UNSAID)
    with suppress(OSError):  # it is there if this rank came late and made it anew
        save.disk.remove_tree(save.partial)
    acknowledge(save)
    return CheckpointError(reason)


def acknowledge(save: Save) -> None:
    """Note that this rank knows why the save failed, if it has."""
    with suppress(OSError):
        save.disk.create(save.failed / f"seen-{save.rank:05d}").close()


def clear_failed(save: Save) -> None:
    """Rank 0 removes what a failed save has left, once every rank knows why it failed."""
    for path in save.failed.glob("rank-*"):  # at once: the disk may be full
        with suppress(OSError):
            save.disk.remove(path)
    deadline = time.monotonic() + min(GRACE, save.patience)
    while save.failed.exists() and len(list(save.failed.glob("seen-*"))) < save.world:
        if time.monotonic() > deadline:
            return  # a late rank can still learn the reason; the next run removes it
        time.sleep(FIRST_POLL)
    with suppress(OSError):
        save.disk.remove_tree(save.failed)


def _publish(save: Save, error: Exception, needed: int) -> str:
    """Rename the partial directory to the failed one; the shard goes first, to make room."""
    with suppress(OSError):
        save.disk.make_directory(save.partial)
    for name in (ticket_name(save.rank), shard_name(save.rank)):
        with suppress(OSError):
            save.disk.remove(save.partial / name)
    reason = explain(save, error, needed)
    with suppress(OSError):  # renamed when it is whole: another rank may read it at any time
        draft = save.partial / f"rank-{save.rank:05d}.draft"
        write_file(save.disk, draft, [memoryview(reason.encode())])
        save.disk.rename(draft, save.partial / f"reason-{save.rank:05d}.txt")
    with suppress(OSError):  # FileNotFoundError: another rank was first
        save.disk.rename(save.partial, save.failed)
    return reason


def explain(save: Save, error: Exception, needed: int) -> str:
    """Say on one line what failed, where, how much was needed, and what to change.

    Args:
        save: the save that failed.
        error: why; a CheckpointError says it on one line already.
        needed: bytes that this rank wanted to write.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    if not isinstance(error, OSError):
        what = " ".join(str(error).split())
        return save.sentence(f"rank {save.rank}: {type(error).__name__}: {what}")
    match error.errno:
        case errno.EDQUOT:
            hint = f"needs {_size(needed)} there; free some, or move the run to another disk"
        case errno.ENOSPC:
            hint = f"needs {_size(needed)} there and {_free(save.directory)} are free; "
            hint += "free some, or move the run to a larger disk"
        case errno.EFBIG:
            hint = f"needs a file of {_size(needed)}; raise the limit on file sizes (ulimit -f)"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            hint = "must write there; give it the right to, or move the run elsewhere"
        case _:
            hint = f"must write {_size(needed)} there; mend the disk, or move the run to another"
    return save.sentence(f"{error.strerror or error}; rank {save.rank} {hint}")


def _free(directory: Path) -> str:
    try:
        return _size(shutil.disk_usage(directory).free)
    except OSError:
        return "none"


def _size(count: int) -> str:
    scaled, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while scaled >= 1024 and len(units) > 1:
        scaled, units = scaled / 1024, units[1:]
    return f"{scaled:.4g} {units[0]}"
