"""When the weights move, and by what: the rules of an update.

AfterTheNorm     once a step, when the norm of the whole gradient is known
Optimistic       once a step, before it is known; rolled back where the norm says so
WeightStashing   after every backward, without a norm (`engine/pipedream.py`)
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.core.run import Recipe
from phalanx.trainer.engine.optimizer import (
    Optimizer,
    PendingScalar,
    clip,
    global_norm,
    pending_norm,
)
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.guard.spikes import SpikeDetector
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.data import ShardedUnit


class Update(NamedTuple):
    """What became of a step: the same on every rank.

    Attributes:
        loss: nats per valid token of the global batch.
        grad_norm: before clipping.
        skipped: a loss or gradient was not finite, and the weights did not move.
    """

    loss: float
    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class Updated:
    """What an update is made of on one rank.

    Attributes:
        recipe: says what is clipped.
        world: all ranks, over which the norm is taken.
        units: whose gradients are reduced.
        optimizer: of this rank's part of their master weights.
        recorder: of what this rank does when.
        spikes: what may keep the weights where they are.
    """

    recipe: Recipe
    world: Group
    units: Sequence[ShardedUnit]
    optimizer: Optimizer
    recorder: Recorder
    spikes: SpikeDetector

    def may_move(self, loss: float, norm: float) -> bool:
        """Whether a step is finite, and no spike that is to be skipped.

        Args:
            loss: of the global batch, nats per valid token.
            norm: of its gradient, before clipping.
        """
        finite = math.isfinite(norm) and math.isfinite(loss)
        return finite and not self.spikes.vetoes(loss, norm)

    def move(self, loss: float, norm: float) -> Update:
        """Clip by the global norm and move the weights, unless they may not.

        Args:
            loss: of the global batch, nats per valid token.
            norm: of its gradient, before clipping.
        """
        skipped = not self.may_move(loss, norm)
        if not skipped:
            clip(self.units, norm, self.recipe.clip)
            self.optimizer.step()
        return Update(loss, norm, skipped)


class UpdateRule:
    """When the weights move; this one never moves them, as an evaluation does.

    The executor announces every forward and surrounds every backward, so that a rule may say which
    weights a micro-batch meets.

    Attributes:
        each_micro_batch: whether each micro-batch is an update of its own, with a mean loss of
            its own; else all of a step are one.
    """

    each_micro_batch = False

    def before_forward(self, microbatch: int) -> None:
        """A micro-batch is about to go forward."""

    def around_backward(self, microbatch: int) -> AbstractContextManager[None]:
        """A micro-batch goes back inside of this."""
        return nullcontext()

    def finish(self, loss: PendingScalar) -> Update:
        """Do what is left of the update, once all gradients of a step are reduced.

        Args:
            loss: of the global batch, nats per valid token, on its way.
        """
        return Update(loss(), 0.0, skipped=False)


class AfterTheNorm(UpdateRule):
    """One update, by the gradient of the whole step, clipped by its norm."""

    def __init__(self, updated: Updated) -> None:
        self.updated = updated

    def finish(self, loss: PendingScalar) -> Update:
        """Wait for the norm and the loss; then move, unless one of them is not finite."""
        updated = self.updated
        norm = global_norm(updated.units, updated.world, updated.recipe.clip_norm)
        return updated.move(loss(), norm)


class Optimistic(UpdateRule):
    """One update, made while loss and norm are on their way, as if there were nothing to clip.

    A rank whose own share of the norm shows already that there is waits, as `AfterTheNorm` does.
    Source: Qi et al. 2024 (arXiv:2401.10241), section 4.
    """

    def __init__(self, updated: Updated) -> None:
        self.updated = updated

    def finish(self, loss: PendingScalar) -> Update:
        """Move, wait for the norm and the loss, and roll back where they do not allow it."""
        updated, recipe = self.updated, self.updated.recipe
        limit = recipe.clip or math.inf
        share, pending = pending_norm(updated.units, updated.world, recipe.clip_norm)
        if not (math.isfinite(share) and share <= limit):
            norm = pending()
            return updated.move(loss(), norm)
        roll_back = updated.optimizer.attempt()
        norm, mean = pending(), loss()
        if norm <= limit and updated.may_move(mean, norm):
            updated.optimizer.confirm()
            return Update(mean, norm, skipped=False)
        with updated.recorder.span("roll back", "optimizer"):
            roll_back()
        return updated.move(mean, norm)
