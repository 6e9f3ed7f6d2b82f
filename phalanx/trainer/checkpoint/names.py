"""What things are called in a directory of checkpoints.

step-00000100/                         a committed checkpoint
    rank-00000.safetensors ...         what each rank owned
    manifest.json                      what the files hold and must read back as
step-00000100.replaced/                still valid; makes room for a new save of the same step
corrupt-step-00000100/                 found damaged and set aside
abandoned-step-00000100/               intact, of a way that the run came back from
.step-00000100.ATTEMPT-COUNT.partial/  being written, with a ticket for each complete shard
.step-00000100.ATTEMPT-COUNT.failed/   given up, with the reason, until every rank has seen it
.step-00000100.ATTEMPT-COUNT.discarded/  being deleted
"""

import re
from pathlib import Path

MANIFEST = "manifest.json"
REPLACED = ".replaced"
ATTEMPT = re.compile(r"\w{1,64}")
SHARD = re.compile(r"rank-\d{5,}\.safetensors")
WORD = re.compile(r"[A-Za-z0-9._-]{1,500}")  # the name of a parameter, or of what is kept of it
KEY = re.compile(r"[A-Za-z0-9._/#-]{1,2000}")  # of a tensor in a shard

_STEP = re.compile(rf"step-(\d{{8,}})({re.escape(REPLACED)})?")
_HIDDEN = re.compile(rf"\.{_STEP.pattern}\.(\w+)-(\d+)\.(partial|failed|discarded)")


def step_name(step: int) -> str:
    """Directory name of a committed checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that the name of a committed checkpoint says; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def shard_name(rank: int) -> str:
    """File name of the pieces of one rank."""
    return f"rank-{rank:05d}.safetensors"


def ticket_name(rank: int) -> str:
    """File name of the index of one rank; it exists only beside a complete, durable shard."""
    return f"rank-{rank:05d}.json"


def hidden_name(name: str, attempt: str, count: int, kind: str) -> str:
    """Name of a directory that readers never look at.

    Args:
        name: of the directory of a checkpoint.
        attempt: which start of the run saves; letters, digits and _.
        count: which save of that attempt, from 1.
        kind: partial, failed or discarded.
    """
    return f".{name}.{attempt}-{count}.{kind}"


def steps(directory: Path) -> list[tuple[int, Path]]:
    """All committed checkpoints as (step, path), newest first; of two of a step, the later one."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = [(int(m[1]), path) for path in paths if (m := _STEP.fullmatch(path.name))]
    return sorted(found, key=lambda item: (-item[0], item[1].name))


def abandon_after(directory: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps, so that a run that goes back never goes on from them.

    Args:
        directory: where checkpoints live; it need not exist.
        step: what the run goes back to; its own checkpoint keeps its name.

    Returns:
        Those that were renamed, under the names that they had.

    Raises:
        OSError: one cannot be renamed; those of later steps have been by then.
    """
    later = [path for found, path in steps(directory) if found > step]
    for path in later:
        target, count = path.with_name(f"abandoned-{path.name}"), 1
        while target.exists():
            count += 1
            target = path.with_name(f"abandoned-{path.name}-{count}")
        path.rename(target)
    return later


def abandoned(directory: Path) -> list[Path]:
    """Checkpoints that a run came back from."""
    return sorted(directory.glob("abandoned-step-*"))


def hidden(directory: Path) -> list[tuple[str, int, Path]]:
    """All directories that readers never look at, as (attempt, count, path)."""
    matches = ((_HIDDEN.fullmatch(path.name), path) for path in directory.iterdir())
    return [(m[3], int(m[4]), path) for m, path in matches if m]
