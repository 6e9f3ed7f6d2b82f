"""A run goes back by itself: to a checkpoint of its own that verifies, and on from there."""

from functools import partial
from pathlib import Path

import torch

from phalanx.core.errors import CheckpointError, PhalanxError
from phalanx.trainer.checkpoint import Checkpoint
from phalanx.trainer.checkpoint.check import set_aside, verify
from phalanx.trainer.checkpoint.manifest import DamagedError
from phalanx.trainer.checkpoint.names import abandon_after, steps
from phalanx.trainer.run.continuity import require_progress
from phalanx.trainer.run.events import Kind
from phalanx.trainer.run.meter import from_rank_0
from phalanx.trainer.run.session import Session
from phalanx.trainer.run.state import own_pieces, restore


def go_back(session: Session, why: str, done: int, kind: Kind = "resume") -> int:
    """Load the newest checkpoint of this run that verifies, and drop what came after it.

    Every rank calls it, after the same step. What was saved later is renamed: it belongs to a way
    that the run does not go.

    Args:
        session: whose state is replaced.
        why: one line, for the event.
        done: steps, now.
        kind: of the event.

    Returns:
        The step to go on with.

    Raises:
        CheckpointError: there is none, or the run has come to this step before and would again.
    """
    if session.saver is None:
        raise CheckpointError(f"{why}; there is nothing to go back to, since nothing is saved")
    session.saver.join()
    if why in session.went_back:
        raise CheckpointError(
            f"{why}, again after it went back; go on with a smaller recipe.learning_rate or "
            "recipe.clip, or look at the text it met there"
        )
    session.went_back.add(why)
    chosen = _choose(session, why, done) if session.worker.rank == 0 else None
    path = from_rank_0(chosen, session.engine.mesh)
    if isinstance(path, PhalanxError):
        raise path
    if not isinstance(path, Path):
        raise TypeError(f"rank 0 chose {path!r}")
    with Checkpoint.open(path) as checkpoint:
        step = restore(session.engine, checkpoint)
    session.meter.forget_after(step)
    session.events.tell(kind, f"{why}; going back to step {step}", step=done, to=step)
    if session.directory and session.metrics:
        session.metrics.forget_after(step)
        session.directory.forget_after(step)
    return step


def is_spoiled(session: Session) -> bool:
    """Whether the weights or the optimizer's state of any rank are not finite; every rank calls."""
    mesh = session.engine.mesh
    bad = torch.zeros((), device=mesh.device)
    for piece in own_pieces(session.engine):
        bad += (~torch.isfinite(piece.data)).any().to(bad)
    mesh.world.all_reduce(bad, "finite", largest=True).wait()
    return bool(bad.item())


def _choose(session: Session, why: str, done: int) -> Path | PhalanxError:
    """Rank 0: the checkpoint to go back to, with those after it out of the way."""
    if session.directory is None:
        return CheckpointError(f"{why}; there is nothing to go back to, since nothing is saved")
    folder = session.directory.checkpoints
    told = partial(session.events.tell, "set aside")
    for step, path in steps(folder):
        if step > done:
            continue
        try:
            verify(path, check=require_progress)
        except DamagedError as error:
            set_aside(path, str(error), told)
            continue
        try:
            abandon_after(folder, step)
        except OSError as error:
            return CheckpointError(f"{why}; cannot go back: {folder}: {error.strerror}")
        return path
    return CheckpointError(
        f"{why}; there is no checkpoint to go back to: start again with recipe.checkpoint_every, "
        "and a smaller recipe.learning_rate if it was no accident"
    )
