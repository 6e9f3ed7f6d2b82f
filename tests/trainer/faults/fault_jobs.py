"""What the tests of faults run on rank processes."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.trainer import faults
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.report import Silent
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.trainer import train
from phalanx.trainer.run.worker import StopSignal, Worker

SHAPE = ModelShape(layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256, tied=True)
RECIPE = Recipe(
    **{"seq": 16, "batch": 4, "steps": 4, "warmup": 2, "evaluate_batches": 1},
    **{"sample_tokens": 0, "checkpoint_every": 2, "check_every": 10},
)


def small_run(text: Path) -> Run:
    """A model of a few thousand parameters on a short text, on two ranks."""
    data = Data(path=str(text), validation=0.1)
    return Run(model=SHAPE, recipe=RECIPE, data=data, layout=Layout.parse("dp=2"))


def worker() -> Worker:
    """This rank of the pool."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return Worker(rank, ranks, rank, ranks, torch.device("cpu"), StopSignal())


def hit_points(run: Run, folder: Path) -> None:
    """Train half of a run and the other half, and let ranks note the points they come by."""
    hits = folder / "hits"
    hits.mkdir(exist_ok=True)
    half = replace(run, recipe=replace(run.recipe, stop_at=2))
    try:
        for attempt, part in enumerate((half, run)):
            faults.load(faults.FaultPlan(hits=str(hits)), dist.get_rank(), attempt)
            train(worker(), part, RunDirectory(folder), Silent(), Resume() if attempt else None)
    finally:
        faults.unload()
