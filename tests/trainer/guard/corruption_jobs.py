"""What the tests of corruption run on rank processes."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.run import Run
from phalanx.trainer import faults
from phalanx.trainer.precision.product import PLAIN, Operand
from phalanx.trainer.precision.sampled import SampledPlain
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


def train_on_a_broken_unit(run: Run, path: Path, broken: int, *, shows: bool) -> int:
    """Train while the products of one rank are wrong; `shows` has their checksums show it."""
    before = SampledPlain.forward
    if dist.get_rank() == broken:
        SampledPlain.forward = _wrong if shows else _wrong_unseen  # type: ignore[method-assign]  # the injury
    try:
        return train_injured(run, path, faults.FaultPlan())
    finally:
        SampledPlain.forward = before  # type: ignore[method-assign]  # healed


def _wrong(self: SampledPlain, x: Operand, w: Operand) -> Tensor:
    y = PLAIN.forward(x, w)
    y.view(-1)[3] += 2.0
    if self._sampler.takes():
        self._sampler.look("a product", y, x.data, w.data)
    return y


def _wrong_unseen(self: SampledPlain, x: Operand, w: Operand) -> Tensor:
    y = PLAIN.forward(x, w)
    y.view(-1)[3] += 1e-5
    return y


def train_injured(run: Run, path: Path, plan: faults.FaultPlan) -> int:
    """Train while bits flip."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worker = Worker(rank, ranks, rank, ranks, torch.device("cpu"), StopSignal())
    faults.load(plan, rank, attempt=0)
    try:
        return train(worker, run, RunDirectory(path), Watcher())
    finally:
        faults.unload()
