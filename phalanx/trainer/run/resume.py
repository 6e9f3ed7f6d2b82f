"""Goes on from a checkpoint: which one, whether it may, and what is another than it was."""

from functools import partial
from pathlib import Path

from phalanx.core.errors import PhalanxError, UsageError
from phalanx.trainer import faults
from phalanx.trainer.checkpoint import Checkpoint, newest, open_verified
from phalanx.trainer.run.continuity import (
    Resume,
    changes,
    identity,
    learning_rate_jump,
    refuse_changes,
    require_progress,
    require_steps,
)
from phalanx.trainer.run.meter import from_rank_0
from phalanx.trainer.run.session import Session
from phalanx.trainer.run.state import restore


def take_up(session: Session, resume: Resume) -> int:
    """Load the checkpoint that rank 0 trusts, and say so; every rank calls it.

    Returns:
        The step to go on with.

    Raises:
        RefusedError: the run would not see the samples that come next.
        UsageError: it ends before the checkpoint.
        CheckpointError: the checkpoint is of another model, or damaged.
    """
    path = from_rank_0(_chosen(session, resume.checkpoint), session.engine.mesh)
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


def _chosen(session: Session, checkpoint: str) -> Path | PhalanxError | None:
    """What rank 0 has chosen, or why it could not, so that all ranks say the same."""
    try:
        return _choose(session, checkpoint) if session.worker.rank == 0 else None
    except PhalanxError as error:
        return error


def _choose(session: Session, checkpoint: str) -> Path | None:
    path = Path(checkpoint)
    if checkpoint == "auto":
        if session.directory is None:
            return None
        path = session.directory.path
    elif not (path / "run.toml").exists():
        with open_verified(path, require_progress) as asked_for:
            return asked_for.path
    told = partial(session.events.tell, "set aside")
    found = newest(path / "checkpoints", told, require_progress)
    if found is not None:
        found.close()
        return found.path
    if checkpoint != "auto":
        raise UsageError(f"{path} has no checkpoint to start from")
    return None
