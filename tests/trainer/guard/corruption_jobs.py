"""What the tests of corruption run on rank processes."""

from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.run import Run
from phalanx.trainer import faults
from phalanx.trainer.run.report import Silent, Summary
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.trainer import train
from phalanx.trainer.run.worker import StopSignal, Worker


class Watcher(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.summary: Summary | None = None

    def on_end(self, summary: Summary) -> None:
        self.summary = summary


def train_injured(run: Run, path: Path, plan: faults.FaultPlan) -> int:
    """Train while bits flip."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worker = Worker(rank, ranks, rank, ranks, torch.device("cpu"), StopSignal())
    faults.load(plan, rank, attempt=0)
    try:
        return train(worker, run, RunDirectory(path), Watcher())
    finally:
        faults.unload()
