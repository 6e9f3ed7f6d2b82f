"""Everything that one rank needs to take steps, and how it is built from a run."""

from dataclasses import dataclass

from phalanx.core.run import Run
from phalanx.schedules.build import lowered, lowered_forward_only
from phalanx.schedules.layouts import is_asynchronous, placement, reduces_every
from phalanx.trainer.engine.balance import Balancer
from phalanx.trainer.engine.device_recorder import CudaClock, DeviceRecorder
from phalanx.trainer.engine.executor import Executor
from phalanx.trainer.engine.optimizer import Optimizer
from phalanx.trainer.engine.pipedream import WeightStashing
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.engine.unit import Source
from phalanx.trainer.engine.update import AfterTheNorm, Optimistic, Updated, UpdateRule
from phalanx.trainer.engine.wire import Form, Wire
from phalanx.trainer.guard.spikes import SpikeDetector
from phalanx.trainer.model.init import init_source, router_biases
from phalanx.trainer.model.stage import Stage, build_stages
from phalanx.trainer.parallel.context import ContextParallel
from phalanx.trainer.parallel.data import ShardedUnit
from phalanx.trainer.parallel.mesh import Mesh
from phalanx.trainer.precision.arithmetic import Arithmetic, choose
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.precision.loss_scale import LossScale


@dataclass(frozen=True)
class Engine:
    """Everything one rank needs to take steps.

    Attributes:
        run: what to train, and how.
        mesh: this rank's place.
        units: every unit of this rank once, in the order of first use.
        executor: of the training schedule.
        rule: when the weights move, and by what.
        optimizer: of this rank's part of the master weights.
        recorder: of what this rank does when.
        loss_scale: of the next step.
        balancer: of the experts of this rank's layers.
        arithmetic: how products are computed.
        spikes: of losses and norms so far.
    """

    run: Run
    mesh: Mesh
    units: list[ShardedUnit]
    executor: Executor
    rule: UpdateRule
    optimizer: Optimizer
    recorder: Recorder
    loss_scale: LossScale
    balancer: Balancer
    arithmetic: Arithmetic
    spikes: SpikeDetector

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
        return Executor(self.executor.stages, wire, self.recorder, UpdateRule())


def build_engine(run: Run, mesh: Mesh, source: Source | None = None) -> Engine:
    """Build this rank's part of the model, its optimizer, its update rule and its executor.

    Args:
        run: resolved for the device of the mesh.
        mesh: this rank's place.
        source: of the first weights; by default what the run says.

    Raises:
        UsageError: the run's folder of weights is none, or of another model.
        CheckpointError: tensors are missing there.
    """
    layout = run.layout
    precision = Dtypes.of(run, mesh.device)
    schedule = lowered(layout, run.micro_batches, reduces_every(layout))
    arithmetic = choose(precision, mesh)
    source = source or init_source(run)
    stages = build_stages(run, mesh, precision, arithmetic.products, source)
    units = list(dict.fromkeys(unit for stage in stages.values() for unit in stage.all_units))
    routers = [router for stage in stages.values() for router in stage.routers]
    biases = router_biases(run)
    for router in routers:
        if (bias := biases.get(int(router.prefix.split(".")[1]))) is not None:
            router.bias.copy_(bias)
    seq = layout.padded_seq(run.recipe.seq) // layout.sequence_parts
    shape = (seq, layout.mb, run.model.hidden)
    wire = Wire(mesh.pipeline, schedule, Form(shape, precision.compute, mesh.device))
    rank = layout.rank_at(mesh.at)
    on_device = mesh.device.type == "cuda"
    recorder = DeviceRecorder(rank, mesh.ledger, CudaClock()) if on_device else Recorder(rank)
    mesh.ledger.watch = recorder.message
    optimizer = Optimizer(run.recipe, units, run.micro_batches if is_asynchronous(layout) else 1)
    spikes = SpikeDetector(run.recipe)
    updated = Updated(run.recipe, mesh.world, units, optimizer, recorder, spikes)
    rule = _rule(run, updated, stages)
    return Engine(
        run=run,
        mesh=mesh,
        units=units,
        executor=Executor(stages, wire, recorder, rule),
        rule=rule,
        optimizer=optimizer,
        recorder=recorder,
        loss_scale=precision.loss_scale(),
        balancer=Balancer(routers, run.recipe.balance_speed, mesh),
        arithmetic=arithmetic,
        spikes=spikes,
    )


def _rule(run: Run, updated: Updated, stages: dict[int, Stage]) -> UpdateRule:
    """The update rule that the layout asks for."""
    if is_asynchronous(run.layout):
        (stage,) = stages.values()
        return WeightStashing(updated, stage.all_units)
    return Optimistic(updated) if run.layout.optimistic else AfterTheNorm(updated)
