"""One training step, top to bottom. Everything it calls is one file away."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from phalanx.core.run import Run
from phalanx.data.batches import Batch
from phalanx.schedules.build import lowered, lowered_forward_only
from phalanx.schedules.layouts import placement, reduces_every
from phalanx.trainer.engine.balance import Balancer, Load
from phalanx.trainer.engine.executor import Executor
from phalanx.trainer.engine.optimizer import Late, Optimizer, clip, late_norm
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.engine.wire import Form, Wire
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.loss import IGNORED
from phalanx.trainer.model.stage import build_stages
from phalanx.trainer.model.start import starting_values
from phalanx.trainer.parallel.context import ContextParallel
from phalanx.trainer.parallel.data import ShardedUnit
from phalanx.trainer.parallel.mesh import Mesh
from phalanx.trainer.precision.arithmetic import Arithmetic, choose
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.precision.loss_scale import LossScale


class StepResult(NamedTuple):
    """What a step did: the same on every rank.

    Attributes:
        loss: nats per valid token of the global batch.
        grad_norm: before clipping.
        skipped: a loss or gradient was not finite, and the weights did not move.
        loss_scale: what the loss was multiplied with.
        load: of the experts of this rank's layers.
    """

    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float = 1.0
    load: Load = Load()


@dataclass(frozen=True)
class Engine:
    """Everything one rank needs to take steps.

    Attributes:
        run: what to train, and how.
        mesh: this rank's place.
        units: every unit of this rank once, in the order of first use.
        executor: of the training schedule.
        optimizer: of this rank's part of the master weights.
        recorder: of what this rank does when.
        loss_scale: of the next step.
        balancer: of the experts of this rank's layers.
        arithmetic: how products are computed.
    """

    run: Run
    mesh: Mesh
    units: list[ShardedUnit]
    executor: Executor
    optimizer: Optimizer
    recorder: Recorder
    loss_scale: LossScale
    balancer: Balancer
    arithmetic: Arithmetic

    def positions(self) -> range:
        """Which sequences of the global batch this rank works on."""
        share = self.run.recipe.batch // self.run.layout.dp
        return range(self.mesh.at.dp * share, (self.mesh.at.dp + 1) * share)

    @property
    def context(self) -> ContextParallel:
        """Which part of each sequence is this rank's, and how attention joins the parts."""
        return ContextParallel(self.mesh.context, self.run.layout.context)

    @property
    def executor_seq(self) -> int:
        """Tokens per sequence that the stages compute with, padding included."""
        return self.executor.wire.form.shape[0] * self.run.layout.sequence_parts

    def forward_executor(self, micro_batches: int, size: int, seq: int) -> Executor:
        """An executor of the same stages that only goes forward.

        Args:
            micro_batches: of its schedule.
            size: sequences per micro-batch.
            seq: tokens per sequence, padding included.
        """
        layout = self.run.layout
        schedule = lowered_forward_only(placement(layout), micro_batches)
        form = self.executor.wire.form
        shape = (seq // layout.sequence_parts, size, form.shape[-1])
        wire = Wire(self.mesh.pipeline, schedule, form._replace(shape=shape))
        return Executor(self.executor.stages, wire, self.recorder)


def build_engine(run: Run, mesh: Mesh) -> Engine:
    """Build this rank's part of the model, its optimizer and its executor."""
    layout = run.layout
    precision = Dtypes.of(run, mesh.device)
    schedule = lowered(layout, run.micro_batches, reduces_every(layout))
    arithmetic = choose(precision, mesh)
    source = starting_values(run)
    stages = build_stages(run, mesh, precision, arithmetic.products, source)
    units = list(dict.fromkeys(unit for stage in stages.values() for unit in stage.all_units))
    routers = [router for stage in stages.values() for router in stage.routers]
    seq = layout.padded_seq(run.recipe.seq) // layout.sequence_parts
    shape = (seq, layout.mb, run.model.hidden)
    wire = Wire(mesh.pipeline, schedule, Form(shape, precision.compute, mesh.device))
    recorder = Recorder(layout.rank_at(mesh.at))
    mesh.ledger.watch = recorder.message
    return Engine(
        run=run,
        mesh=mesh,
        units=units,
        executor=Executor(stages, wire, recorder),
        optimizer=Optimizer(run.recipe, units),
        recorder=recorder,
        loss_scale=precision.loss_scale(),
        balancer=Balancer(routers, run.recipe.balance_speed, mesh),
        arithmetic=arithmetic,
    )


def train_step(engine: Engine, step: int, batch: Batch) -> StepResult:
    """Do the work of the schedule, then move the weights once."""
    return update(engine, passes(engine, step, batch))


def forward_backward(engine: Engine, step: int, batch: Batch) -> float:
    """As `passes`, and wait for the loss."""
    return passes(engine, step, batch)()


def passes(engine: Engine, step: int, batch: Batch) -> Late:
    """Do all forwards and backwards, and reduce the gradients.

    Args:
        engine: of this rank.
        step: from 0.
        batch: the sequences at `engine.positions()`.

    Returns:
        The loss of the global batch, nats per valid token, on its way; the same on every rank.
    """
    batches = micro_batches(engine, step, batch)
    valid = count_valid(engine, batches)
    engine.arithmetic.history.begin_step()
    loss = engine.executor.run(batches, engine.loss_scale.value / valid)
    with engine.recorder.span("reduce", "communicate"):
        engine.arithmetic.history.finish_step()
        for unit in engine.units:
            unit.finish()
        engine.balancer.reduce()
        engine.loss_scale.unscale(grad for unit in engine.units for grad in unit.gradients())
        return late_loss(engine, loss, valid)


def update(engine: Engine, loss: float | Late) -> StepResult:
    """Clip by the global norm and move the weights, unless something is not finite.

    An optimistic update moves them while loss and norm are on their way, as if there were nothing
    to clip; unless this rank's share of the norm shows already that there is.
    """
    recipe, optimizer = engine.run.recipe, engine.optimizer
    limit = recipe.clip or math.inf
    with engine.recorder.span("update", "optimizer"):
        share, late_total = late_norm(engine.units, engine.mesh.world, recipe.clip_norm)
        hopeful = engine.run.layout.optimistic and math.isfinite(share) and share <= limit
        take_back = optimizer.attempt() if hopeful else None
        norm, loss = late_total(), loss() if callable(loss) else loss
        skipped = not (math.isfinite(norm) and math.isfinite(loss))
        if take_back and (skipped or norm > limit):
            with engine.recorder.span("take back", "optimizer"):
                take_back()
            take_back = None
        if take_back:
            optimizer.confirm()
        elif not skipped:
            clip(engine.units, norm, recipe.clip)
            optimizer.step()
        if not skipped:
            engine.balancer.move()
    used = engine.loss_scale.value
    engine.loss_scale.learn(skipped=skipped)
    return StepResult(loss, norm, skipped, used, engine.balancer.load)


def evaluate(engine: Engine, executor: Executor, batch: Batch) -> float:
    """The loss of one global batch, without learning from it.

    Args:
        engine: of this rank.
        executor: that only goes forward, with the micro-batches of the training schedule.
        batch: the sequences at `engine.positions()`.
    """
    batches = micro_batches(engine, 0, batch)
    valid = count_valid(engine, batches)
    with torch.no_grad():
        return late_loss(engine, executor.run(batches, 1 / valid), valid)()


def micro_batches(engine: Engine, step: int, batch: Batch) -> list[MicroBatch]:
    """Cut this rank's part of its sequences into micro-batches.

    Sequences are padded so that cp and tp can cut them: at the end, where no token looks at the
    padding, and it counts in no loss.
    """
    seq = engine.run.recipe.seq
    pad = engine.run.layout.padded_seq(seq) - seq
    device, context = engine.mesh.device, engine.context

    def sequence_first(values: NDArray[np.int64], fill: int) -> Tensor:
        whole = F.pad(torch.from_numpy(values), (0, pad), value=fill).t()
        return context.my_part(whole).contiguous().to(device)

    tokens = sequence_first(batch.tokens, 0)
    targets = sequence_first(batch.targets, IGNORED)
    positions = sequence_first(batch.positions, 0)
    documents = None
    if batch.documents is not None:
        documents = F.pad(torch.from_numpy(batch.documents), (0, pad), value=-1).to(device)
    samples = torch.tensor(engine.positions(), device=device)
    size = engine.run.layout.mb
    return [
        MicroBatch(
            tokens=tokens[:, i : i + size],
            targets=targets[:, i : i + size],
            positions=positions[:, i : i + size],
            documents=None if documents is None else documents[i : i + size],
            samples=samples[i : i + size],
            seq=seq,
            step=step,
            loss_scale=engine.loss_scale.value,
            context=context,
        )
        for i in range(0, len(samples), size)
    ]


def count_valid(engine: Engine, batches: Sequence[MicroBatch]) -> Tensor:
    """How many predictions of the global batch count, at least 1; in the dtype of the loss."""
    wide = torch.float64 if engine.executor.wire.form.dtype == torch.float64 else torch.float32
    valid = sum(((b.targets != IGNORED).sum() for b in batches), torch.zeros((), dtype=torch.int64))
    total = valid.to(engine.mesh.device)
    engine.mesh.data.all_reduce(total, "valid tokens").wait()
    return total.clamp(min=1).to(wide)


def valid_tokens(engine: Engine, batches: Sequence[MicroBatch]) -> Tensor:
    """As `count_valid`, but of each micro-batch: [m]."""
    wide = torch.float64 if engine.executor.wire.form.dtype == torch.float64 else torch.float32
    valid = torch.stack([(b.targets != IGNORED).sum() for b in batches])
    engine.mesh.data.all_reduce(valid, "valid tokens").wait()
    return valid.clamp(min=1).to(wide)


def late_loss(engine: Engine, loss: Tensor, valid: Tensor) -> Late:
    """Add up the losses that ranks hold, each counted once, and divide by the valid tokens."""
    if engine.mesh.tensor.index > 0:
        loss = torch.zeros_like(loss)
    pending = engine.mesh.world.all_reduce(loss, "loss")

    def arrived() -> float:
        pending.wait()
        return loss.item() / valid.item()

    return arrived
