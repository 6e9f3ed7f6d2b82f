"""One training step, top to bottom. Everything it calls is one file away."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.data.batches import Batch
from phalanx.trainer import faults
from phalanx.trainer.engine.balance import ExpertLoad
from phalanx.trainer.engine.batching import count_targets, count_valid, micro_batches
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.engine.executor import Executor
from phalanx.trainer.engine.optimizer import PendingScalar


class StepResult(NamedTuple):
    """What a step did: the same on every rank, but for the load.

    Attributes:
        loss: nats per valid token of the global batch.
        grad_norm: before clipping.
        skipped: the weights did not move: a loss or gradient was not finite, or a spike.
        loss_scale: what the loss was multiplied with.
        load: of the experts of this rank's layers.
    """

    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float = 1.0
    load: ExpertLoad = ExpertLoad()


class LossSum(NamedTuple):
    """Losses of several sequences, added up: the same on every rank.

    Attributes:
        nats: of all predictions that count.
        tokens: how many of them there are.
    """

    nats: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """Nats per prediction that counts; nan where there is none."""
        return self.nats / self.tokens if self.tokens else math.nan


def train_step(engine: Engine, step: int, batch: Batch) -> StepResult:
    """Take one step: forwards and backwards as the schedule orders them, then the update.

    Args:
        engine: of this rank.
        step: from 0.
        batch: the sequences at `engine.positions()`.
    """
    loss = passes(engine, step, batch)
    faults.point("step.before_update", step=step)
    return update(engine, loss)


def passes(
    engine: Engine, step: int, batch: Batch, positions: range | None = None
) -> PendingScalar:
    """Do all forwards and backwards, and reduce the gradients.

    Args:
        engine: of this rank.
        step: from 0.
        batch: the sequences at these positions.
        positions: in the global batch; None means `engine.positions()`.

    Returns:
        The loss of the global batch, nats per valid token, on its way; the same on every rank.

    Raises:
        ActionError: an action of the schedule failed for a reason that is not the user's.
    """
    with engine.recorder.span("micro-batches", "data"):
        batches = micro_batches(engine, step, batch, positions)
        valid = count_valid(engine, batches, each=engine.rule.each_micro_batch)
    engine.arithmetic.history.begin_step()
    losses = engine.executor.run(batches, engine.loss_scale.value / valid)
    with engine.recorder.span("reduce", "communicate"):
        engine.arithmetic.history.finish_step()
        for unit in engine.units:
            unit.finish()
        engine.balancer.reduce()
        engine.loss_scale.unscale(grad for unit in engine.units for grad in unit.gradients())
        return pending_loss(engine, losses, valid)


def forward_backward(engine: Engine, step: int, batch: Batch) -> float:
    """As `passes`, and wait for the loss.

    Args:
        engine: of this rank.
        step: from 0.
        batch: the sequences at `engine.positions()`.

    Returns:
        The loss of the global batch, nats per valid token.
    """
    return passes(engine, step, batch)()


def update(engine: Engine, loss: float | PendingScalar) -> StepResult:
    """Let the weights move as the update rule says, and the biases of experts with them.

    Args:
        engine: of this rank, its gradients reduced.
        loss: of the global batch; it may be on its way.
    """
    with engine.recorder.span("update", "optimizer"):
        found = engine.rule.finish(loss if callable(loss) else lambda: loss)
        if not found.skipped:
            engine.balancer.move()
    engine.recorder.collect()
    used = engine.loss_scale.value
    finite = math.isfinite(found.loss) and math.isfinite(found.grad_norm)
    engine.loss_scale.learn(skipped=found.skipped and not finite)
    return StepResult(*found, used, engine.balancer.load)


def evaluate(engine: Engine, executor: Executor, batch: Batch) -> LossSum:
    """The loss of one global batch, without learning from it: neither smoothed nor dropped out.

    Args:
        engine: of this rank.
        executor: that only goes forward, with the micro-batches of the training schedule.
        batch: the sequences at `engine.positions()`.
    """
    batches = micro_batches(engine, 0, batch)
    tokens = int(count_targets(engine, batches).item())
    one = torch.ones((), dtype=torch.float64)
    with torch.no_grad():
        return LossSum(pending_loss(engine, executor.run(batches, one), one)(), tokens)


def pending_loss(engine: Engine, losses: Sequence[Tensor], valid: Tensor) -> PendingScalar:
    """The mean loss of the global batch, from those that ranks hold, each counted once.

    Args:
        engine: of this rank.
        losses: summed over the tokens of each micro-batch whose last stage this rank holds.
        valid: tokens that count: of all micro-batches together, or [m], where each micro-batch has
            a mean of its own.
    """
    total = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
    if engine.mesh.tensor.index == 0 and losses:
        if valid.dim():
            total += (torch.stack(list(losses)).double() * (1 / valid)).mean()
        else:
            for loss in losses:  # one after the other: the order is that of the schedule
                total += loss.double()
    faults.point("loss", tensors=lambda: {"loss": total})
    pending = engine.mesh.world.all_reduce(total, "loss")

    def arrived() -> float:
        pending.wait()
        return total.item() / (1.0 if valid.dim() else valid.item())

    return arrived
