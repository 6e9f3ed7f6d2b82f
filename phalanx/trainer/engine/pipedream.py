"""PipeDream: every backward moves the weights of its stage at once, and nothing waits for anything.

A stage goes forward with the newest weights that it has. Until a micro-batch comes back they may
have moved; its backward then uses the weights of its forward (weight stashing), and its gradient
is applied to newer ones. So each micro-batch is an update of its own, with a gradient that is a
few updates stale on early stages: the update differs from that of one device by design.
Source: Narayanan et al. 2019 (SOSP; Harlap et al., arXiv:1806.03377), sections 3.2 and 3.3.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.core.schedule import Action
from phalanx.data.batches import Batch
from phalanx.trainer.engine.executor import Executor
from phalanx.trainer.engine.optimizer import Optimizer, global_norm
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.engine.step import Engine, StepResult, late_loss, micro_batches, valid_tokens
from phalanx.trainer.engine.weight_gradients import Kept
from phalanx.trainer.engine.wire import Wire
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.stage import Stage


class Stashing(Executor):
    """Moves the weights of its one stage after every backward, and keeps those still needed."""

    def __init__(
        self, stages: Mapping[int, Stage], wire: Wire, recorder: Recorder, optimizer: Optimizer
    ) -> None:
        super().__init__(stages, wire, recorder)
        ((self._stage, stage),) = stages.items()
        self._units, self._optimizer = stage.all_units, optimizer
        self._version = 0
        self._used: dict[int, int] = {}  # by micro-batch in flight: the version it went out with
        self._stash: dict[int, list[Tensor]] = {}
        self._losses: list[Tensor] = []

    def run(self, batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """Do the whole row, which is one update per micro-batch.

        Args:
            batches: the micro-batches that its actions number.
            scale: [m], 1 / valid tokens of each.

        Returns:
            The mean over micro-batches of their mean losses, if this rank holds the last stage.
        """
        self._losses.clear()
        super().run(batches, scale)
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=scale.device)
        return (torch.stack(self._losses).double() * scale).mean()

    @property
    def stashed(self) -> int:
        """Versions of the weights that are held beside the newest."""
        return len(self._stash)

    def _forward(self, action: Action, batch: MicroBatch, *, logits: bool = False) -> Tensor | None:
        self._used[action.microbatch] = self._version
        loss = super()._forward(action, batch, logits=logits)
        if loss is not None:
            self._losses.append(loss)
        return loss

    def _backward(self, action: Action, scale: Tensor, kept: Kept | None = None) -> None:
        version = self._used.pop(action.microbatch)
        with self._weights_of(version):
            super()._backward(action, scale[action.microbatch], kept)
        if version not in self._used.values():
            self._stash.pop(version, None)
        for unit in self._units:
            unit.finish()
        if self._version in self._used.values():
            self._stash[self._version] = self._copies()
        with self.recorder.span(f"update {action.microbatch}", "optimizer"):
            self._optimizer.step()
        self._version += 1

    @contextmanager
    def _weights_of(self, version: int) -> Iterator[None]:
        """Inside, the stage has the weights of an older version."""
        if version == self._version:
            yield
            return
        newest = self._copies()
        self._fill(self._stash[version])
        yield
        self._fill(newest)

    def _copies(self) -> list[Tensor]:
        for unit in self._units:
            unit.acquire()
        return [unit.unit.weights.clone() for unit in self._units]

    def _fill(self, values: list[Tensor]) -> None:
        for unit, value in zip(self._units, values, strict=True):
            unit.unit.weights.copy_(value)


def asynchronous(engine: Engine) -> Engine:
    """The same engine, obeying its schedule as PipeDream does."""
    old, optimizer = engine.executor, engine.optimizer
    optimizer.updates_per_step = old.wire.schedule.m
    executor = Stashing(old.stages, old.wire, engine.recorder, optimizer)
    return replace(engine, executor=executor)


def pipedream_step(engine: Engine, step: int, batch: Batch) -> StepResult:
    """Do all updates of one step: as many as it has micro-batches.

    The norm is that of the last micro-batch's gradient. Nothing is clipped or skipped: that
    would need what other stages have not done yet.
    """
    batches = micro_batches(engine, step, batch)
    valid = valid_tokens(engine, batches)
    loss = engine.executor.run(batches, 1 / valid)
    mean = late_loss(engine, loss, torch.ones_like(loss))()
    norm = global_norm(engine.units, engine.mesh.world, engine.run.recipe.clip_norm)
    return StepResult(mean, norm, skipped=not math.isfinite(mean + norm))
