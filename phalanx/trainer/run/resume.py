"""Goes on from a checkpoint: which one, whether it may, and what is another than it was."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from phalanx.core.errors import CheckpointError, PhalanxError, UsageError
from phalanx.data.skips import Skips
from phalanx.trainer import faults
from phalanx.trainer.checkpoint import Checkpoint, newest, open_verified
from phalanx.trainer.checkpoint.index import whole
from phalanx.trainer.checkpoint.manifest import read_manifest
from phalanx.trainer.checkpoint.names import steps
from phalanx.trainer.run.continuity import (
    Resume,
    changes,
    identity,
    learning_rate_jump,
    refuse_changes,
    require_progress,
    require_steps,
)
from phalanx.trainer.run.events import EventLog
from phalanx.trainer.run.meter import from_rank_0
from phalanx.trainer.run.session import Session
from phalanx.trainer.run.state import restore


def take_up(session: Session, resume: Resume) -> int:
    """Load the checkpoint that rank 0 trusts, and say so; every rank calls it.

    Args:
        session: of this rank, whose weights and optimizer state are replaced.
        resume: what to go on from, and what may differ.

    Returns:
        The step to go on with.

    Raises:
        RefusedError: the run would not see the samples that come next.
        UsageError: it ends before the checkpoint, or what it was to start from has none.
        CheckpointError: the checkpoint is of another model, or damaged.
    """
    path = from_rank_0(_chosen(session, resume), session.engine.mesh)
    if isinstance(path, PhalanxError):
        raise path
    if not isinstance(path, Path):
        text = "no checkpoint to resume from; starting at the first step"
        session.events.tell("resume", text, step=0)
        if session.directory:
            session.directory.forget_after(0)
        return 0
    faults.point("resume.before")
    with Checkpoint.open(path) as checkpoint:
        found = changes(checkpoint.state, identity(session.run, session.corpus))
        if not resume.may_differ:
            refuse_changes(found, str(path))
        jump = learning_rate_jump(checkpoint.state, session.run.recipe)
        step = restore(session.engine, checkpoint)
        if not found:  # of other text or other batches they say nothing
            session.training.skips = Skips.from_json(checkpoint.state.get("skips", ()))
    faults.point("resume.after", step=step)
    text = f"resumed {path.name} under {session.run.layout}"
    session.events.tell("resume", text, step=step, checkpoint=str(path))
    all_done = require_steps(session.run.recipe, step)
    for line in (*map(str, found), jump, all_done):
        if line:
            session.events.note(line)
    if session.directory:
        session.directory.forget_after(step)
    return step


def _chosen(session: Session, resume: Resume) -> Path | PhalanxError | None:
    """What rank 0 has chosen, or why it could not, so that all ranks say the same."""
    try:
        return _choose(session, resume) if session.worker.rank == 0 else None
    except PhalanxError as error:
        return error


def _choose(session: Session, resume: Resume) -> Path | None:
    """Rank 0: the checkpoint to go on from; None where the run begins anew."""
    own = session.directory.path if session.directory else None
    if resume.restarted and own is not None and (found := _newest(session, own)):
        return found
    if resume.checkpoint in ("", "auto"):
        return _newest(session, own) if own is not None and not resume.restarted else None
    path = Path(resume.checkpoint)
    if not (path / "run.toml").exists():
        with open_verified(path, require_progress) as asked_for:
            return asked_for.path
    found = _newest(session, path)
    if found is None:
        raise UsageError(f"{path} has no checkpoint to start from")
    return found


def _newest(session: Session, run: Path) -> Path | None:
    _set_stale_aside(run / "checkpoints", session.events)
    told = partial(session.events.tell, "set aside")
    found = newest(run / "checkpoints", told, require_progress)
    if found is None:
        return None
    found.close()
    return found.path


def _set_stale_aside(checkpoints: Path, events: EventLog) -> None:
    """Take out of the row what a start has saved after a later one had taken its place.

    Fencing numbers rise with the steps; where one is lower than that of an earlier step, its
    writer did not know that the run had gone on without it.
    """
    highest = 0
    for step, path in reversed(steps(checkpoints)):
        # whatever is wrong with it is told by `newest`
        with suppress(CheckpointError, OSError, TypeError):
            fence = whole(read_manifest(path).state.get("fence", 0))
            if fence >= highest:
                highest = fence
                continue
            aside = path.with_name(f"stale-{path.name}")
            path.rename(aside)
            text = (
                f"{path.name} was saved by start {fence} of this run after start {highest} had "
                f"begun; set aside as {aside.name}"
            )
            events.tell("set aside", text, step=step, checkpoint=str(aside))
