"""The null accelerator: stages whose actions take a stated time and compute nothing.

The executor, the wire and the schedule are the real ones, so what a pipeline of many ranks waits
for can be measured where there are few cores: a rank that sleeps uses none.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.core.schedule import Kind
from phalanx.trainer.engine.saved import SavedTensors
from phalanx.trainer.engine.weight_gradients import WeightGradients
from phalanx.trainer.engine.wire import Form
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.stage import Stage
from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.parallel.data import Reducer

Pace = Mapping[Kind, float]  # seconds of F, I and W; a whole B takes I + W


@dataclass(frozen=True)
class PacedStage(Stage):
    """A stage that sleeps.

    Attributes:
        pace: how long it sleeps.
        form: of what it hands on.
        ends: it hands on a loss, since it ends the model.
        weight: stands for all of its weights.
    """

    pace: Pace
    form: Form
    ends: bool
    weight: nn.Parameter

    def forward(self, x: Tensor | None, batch: MicroBatch, *, logits: bool = False) -> Tensor:
        """Sleep for as long as F takes; the result stands in for the stage's output.

        Args:
            x: of `form`; None on the first stage.
            batch: not looked at.
            logits: not looked at.

        Returns:
            Zeros of `form`; a scalar where the stage ends the model.
        """
        return cast(Tensor, apply(_Sleep, self, x, self.weight))


def paced_stage(index: int, pace: Pace, form: Form, *, ends: bool) -> PacedStage:
    """A stage of a schedule, asleep.

    Args:
        index: in the schedule.
        pace: seconds of F, I and W.
        form: of what it takes and hands on.
        ends: whether it ends the model, and hands on a loss.
    """
    gradients = WeightGradients()
    weight = nn.Parameter(torch.zeros(1, dtype=form.dtype, device=form.device))
    gradients.adopt(_NoOwner(), [weight])
    return PacedStage(
        index=index,
        parts=(),
        units=(),
        reducer=Reducer([]),
        gradients=gradients,
        recomputes=0,
        saved=SavedTensors(),
        pace=pace,
        form=form,
        ends=ends,
        weight=weight,
    )


class _NoOwner:
    """Accumulates nothing."""

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Forget the gradient."""

    def passed(self, index: int) -> None:
        """Nothing waits for it."""


class _Sleep(torch.autograd.Function):
    """F when it goes forward; I, and the work of W, when it goes back."""

    @staticmethod
    def forward(ctx: Any, stage: PacedStage, x: Tensor | None, weight: Tensor) -> Tensor:
        ctx.stage, ctx.has_input = stage, x is not None
        time.sleep(stage.pace[Kind.FORWARD])
        form = stage.form
        shape = () if stage.ends else form.shape
        return torch.zeros(shape, dtype=form.dtype, device=form.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stage = cast(PacedStage, ctx.stage)
        form = stage.form
        time.sleep(stage.pace[Kind.INPUT_GRAD])
        dx = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
        work = _SleepWork(stage)
        return None, dx if ctx.has_input else None, *stage.gradients.finish(work)


class _SleepWork:
    """The weight gradients of a stage that sleeps."""

    def __init__(self, stage: PacedStage) -> None:
        self.weights, self.stage = (stage.weight,), stage

    def start(self) -> None:
        """Send nothing."""

    def finish(self) -> tuple[Tensor, ...]:
        """Sleep for as long as W takes."""
        time.sleep(self.stage.pace[Kind.WEIGHT_GRAD])
        return (torch.zeros_like(self.weights[0]),)
