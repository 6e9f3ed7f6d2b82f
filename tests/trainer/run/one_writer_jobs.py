"""What test_one_writer.py runs on a rank process."""

from pathlib import Path

import torch

from phalanx.core.run import Run
from phalanx.trainer.run.report import Silent, StepMetrics
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.trainer import train
from phalanx.trainer.run.worker import StopSignal, Worker


class TakesOver(Silent):
    """Begins to write in the folder of a run, as another start would, after its first step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == 1:
            RunDirectory(self._path).take_over()


def taken_over_job(run: Run, path: Path) -> None:
    worker = Worker(0, 1, 0, 1, torch.device("cpu"), StopSignal())
    train(worker, run, RunDirectory(path), TakesOver(path))
