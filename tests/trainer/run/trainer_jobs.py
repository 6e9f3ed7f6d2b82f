"""What the trainer tests run on rank processes."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.trainer import faults
from phalanx.trainer.checkpoint import Checkpoint, Saver, agreement
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import forward_backward
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.report import Silent, StepMetrics, Summary
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.state import own_pieces, progress, restore
from phalanx.trainer.run.trainer import train
from phalanx.trainer.run.worker import StopSignal, Worker

SHAPE = ModelShape(layers=4, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=256, tied=True)
RECIPE = Recipe(seq=16, batch=8, steps=8, warmup=2, evaluate_batches=1, sample_tokens=0)


def small_run(text: Path) -> Run:
    """A model of a few thousand parameters on a short text."""
    return Run(model=SHAPE, recipe=RECIPE, data=Data(path=str(text), validation=0.1))


@dataclass
class Watcher(Silent):
    """Keeps what it is told; stops the run after some step if it should."""

    stop: StopSignal
    stop_after: int = 0
    steps: list[StepMetrics] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    summary: Summary | None = None

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        self.stop.requested = metrics.step == self.stop_after

    def on_event(self, text: str) -> None:
        self.events.append(text)

    def on_end(self, summary: Summary) -> None:
        self.summary = summary


@dataclass
class Trained:
    """What one rank has to say after training."""

    code: int
    losses: list[float]
    events: list[str]
    summary: Summary | None


def train_job(run: Run, path: Path, resume: Resume | None = None, stop_after: int = 0) -> Trained:
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = run.layout.ranks
    stop = StopSignal()
    worker = Worker(rank, ranks, rank, ranks, torch.device("cpu"), stop)
    watcher = Watcher(stop, stop_after)
    code = train(worker, run, RunDirectory(path), watcher, resume)
    return Trained(code, [m.loss for m in watcher.steps], watcher.events, watcher.summary)


def injured_job(
    run: Run, path: Path, plan: faults.FaultPlan, resume: Resume | None = None
) -> Trained:
    """As `train_job`, while things go wrong."""
    faults.load(plan, dist.get_rank() if dist.is_initialized() else 0, attempt=0)
    try:
        return train_job(run, path, resume)
    finally:
        faults.unload()


def unhurried_job(run: Run, path: Path, plan: faults.FaultPlan) -> Trained:
    """As `injured_job`, while rank 1 takes its time to see that a save is committed."""
    before = agreement.FIRST_POLL
    agreement.FIRST_POLL = 0.5 if dist.get_rank() else before
    try:
        return injured_job(run, path, plan)
    finally:
        agreement.FIRST_POLL = before


def apart_job(run: Run, path: Path) -> Trained:
    """As `train_job`, with a folder for each rank, as machines have that share none."""
    return train_job(run, path / str(dist.get_rank()))


def reshard_job(run: Run, source: Path, target: Path) -> float:
    """Take up a checkpoint under another layout, save it again, and say what the next loss is."""
    mesh = build_mesh(run.layout, torch.device("cpu"), kv_heads=run.model.kv_heads)
    engine = build_engine(run, mesh)
    with Checkpoint.open(source) as checkpoint:
        step = restore(engine, checkpoint)
    saver = Saver(target, run.layout.rank_at(mesh.at), mesh.world.size, attempt="again")
    saver.save(step, own_pieces(engine), progress(engine, step, {}))
    saver.wait()
    return forward_backward(engine, step, _batch(run, step, engine.positions()))


def _batch(run: Run, step: int, positions: range):
    from phalanx.data.synthetic import SyntheticStream

    stream = SyntheticStream(run.model.vocab, run.recipe.seq, run.recipe.batch, seed=1)
    return stream.batch(step, positions)
