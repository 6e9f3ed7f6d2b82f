"""A run goes back by itself: to a checkpoint of its own that verifies, and on from there."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx.core.errors import CheckpointError, PhalanxError
from phalanx.trainer.checkpoint import Checkpoint
from phalanx.trainer.checkpoint.check import set_aside, verify
from phalanx.trainer.checkpoint.manifest import DamagedError
from phalanx.trainer.checkpoint.names import abandon_after, steps
from phalanx.trainer.guard.corruption import Suspicion
from phalanx.trainer.run.continuity import require_progress
from phalanx.trainer.run.events import Kind
from phalanx.trainer.run.meter import from_rank_0
from phalanx.trainer.run.session import Session
from phalanx.trainer.run.state import own_pieces, restore


class Back(NamedTuple):
    """Why a run goes back, and how far.

    Attributes:
        why: one line, for the event.
        kind: of the event.
        window: batches up to the last one that are skipped then; 0 does the same steps again.
        rank: whom it is about, where it is one.
        advice: what to change if the run comes to the same again.
    """

    why: str
    kind: Kind = "resume"
    window: int = 0
    rank: int | None = None
    advice: str = (
        "go on with a smaller recipe.learning_rate or recipe.clip, or look at the text it met there"
    )


def look(session: Session, done: int) -> Back | None:
    """Look for silent corruption, on every rank alike.

    Args:
        session: of this rank.
        done: steps, now.

    Returns:
        Where to go back to, if some rank is suspected; what it holds is not saved.
    """
    found = session.watch.find()
    return None if found is None else suspected(found, done)


def suspected(found: Suspicion, done: int) -> Back:
    """Where to go back to, since a rank is suspected to have wrong numbers.

    Args:
        found: who, and what is wrong.
        done: steps, now.
    """
    rank = found.ranks[0] if len(found.ranks) == 1 else None
    advice = "take its machine out; memory or arithmetic of it cannot be trusted"
    return Back(f"step {done}: {found}", "suspicion", rank=rank, advice=advice)


def go_back(session: Session, back: Back, done: int) -> int:
    """Load a checkpoint of this run that verifies, and drop what came after it.

    Every rank calls it, after the same step. What was saved later is renamed: it belongs to a way
    that the run does not go.

    Args:
        session: whose state is replaced.
        back: why, and how far.
        done: steps, now.

    Returns:
        The step to go on with: `done` where no checkpoint lies before a spike.

    Raises:
        CheckpointError: there is none, or the run has come to this step before and would again.
    """
    why, training = back.why, session.training
    if session.saver is None:
        raise CheckpointError(f"{why}; there is nothing to go back to, since nothing is saved")
    session.saver.join()
    # what one rank still looks for, to know that its save is done, another may not rename
    mesh = session.engine.mesh
    mesh.world.all_reduce(torch.zeros((), device=mesh.device), "saves").wait()
    if why in session.went_back and not back.window:
        raise CheckpointError(f"{why}, again after it went back; {back.advice}")
    session.went_back.add(why)
    before = max(done - back.window, 0)
    chosen = _chosen(session, why, done, before) if session.worker.rank == 0 else None
    path = from_rank_0(chosen, session.engine.mesh)
    if isinstance(path, PhalanxError):
        if not back.window:
            raise path
        session.events.tell(back.kind, f"{path}; the run goes on", step=done)
        return done
    if not isinstance(path, Path):
        raise TypeError(f"rank 0 chose {path!r}")
    with Checkpoint.open(path) as checkpoint:
        step = restore(session.engine, checkpoint)
    text = f"{why}; going back to step {step}"
    if back.window:
        at, last = max(before, step), training.skips.batch_of(done - 1)
        skipped = range(training.skips.batch_of(at), last + 1)
        training.skips = training.skips.jump(at, last + 1)
        text += f", and skipping batches {skipped[0]} to {skipped[-1]} at step {at}"
    session.meter.forget_after(step)
    more = {"to": step, "skips": training.skips.to_json()}
    session.events.tell(back.kind, text, step=done, rank=back.rank, **more)
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


def _chosen(session: Session, why: str, done: int, before: int) -> Path | PhalanxError:
    """Rank 0: the checkpoint to go back to, with those after it out of the way.

    The newest that is no later than step `before`, else the oldest that there is.
    """
    if session.directory is None:
        return CheckpointError(f"{why}; there is nothing to go back to, since nothing is saved")
    folder = session.directory.checkpoints
    there = [(step, path) for step, path in steps(folder) if step <= done]
    later = [found for found in reversed(there) if found[0] > before]
    for step, path in [found for found in there if found[0] <= before] + later:
        try:
            verify(path, check=require_progress)
        except DamagedError as error:
            set_aside(path, str(error), partial(session.events.tell, "set aside"))
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
