"""Obeys a schedule: takes one rank's row of actions and does them in order, no more and no less."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.core.schedule import Action, Kind
from phalanx.schedules.messages import other_end
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.engine.weight_gradients import Kept
from phalanx.trainer.engine.wire import Wire
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.stage import Stage


class Executor:
    """Runs the stages of one rank.

    Attributes:
        stages: by index, those that this rank holds.
        wire: to the ranks that hold the others; its schedule is the one obeyed.
        row: what this rank does.
    """

    def __init__(self, stages: Mapping[int, Stage], wire: Wire, recorder: Recorder) -> None:
        self.stages, self.wire, self.recorder = stages, wire, recorder
        self.row = wire.schedule.rows[wire.group.index]
        self._depth = wire.schedule.depth
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], GradientEdge] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        self._ready: dict[Action, Tensor] = {}

    def run(self, batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """Do the whole row.

        Args:
            batches: the micro-batches that its actions number.
            scale: gradient of the update's loss by the summed loss: 1 / valid tokens.

        Returns:
            The summed loss of all micro-batches whose last stage this rank holds; a float64
            scalar.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.wire.form.device)
        for action in self.row:
            loss = self._do(action, batches, scale)
            if loss is not None:
                total += loss.double()
        self.wire.finish()
        return total

    def infer(self, batch: MicroBatch) -> Tensor | None:
        """Do a row that only goes forward, with one micro-batch, and stop before the loss.

        Returns:
            This rank's logits [s, b, V/t] if it holds the last stage, else None.
        """
        logits = None
        with torch.no_grad():
            for action in self.row:
                if action.kind is Kind.FORWARD:
                    logits = self._forward(action, batch, logits=True)
                else:
                    self._do(action, [batch], torch.empty(0))
        self.wire.finish()
        return logits

    def _do(self, action: Action, batches: Sequence[MicroBatch], scale: Tensor) -> Tensor | None:
        """Do one action; the forward of the last stage returns its loss."""
        match action.kind:
            case Kind.FORWARD:
                return self._forward(action, batches[action.microbatch])
            case Kind.BACKWARD:
                self._backward(action, scale)
            case Kind.INPUT_GRAD:
                with self.stages[action.stage].gradients.keeping() as kept:
                    self._backward(action, scale, kept)
                self._kept[action.stage, action.microbatch] = kept
            case Kind.WEIGHT_GRAD:
                self._weight_grad(action)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                self.wire.send(action, self._ready.pop(action))
            case Kind.RECV_FORWARD | Kind.RECV_BACKWARD:
                self.wire.expect(action)
            case Kind.REDUCE:
                self.stages[action.stage].reducer.arm()
        return None

    def _forward(self, action: Action, batch: MicroBatch, *, logits: bool = False) -> Tensor | None:
        stage, i = action.stage, action.microbatch
        x = None if self._first(stage) else self._take(Action(stage, Kind.RECV_FORWARD, i))
        with self.recorder.span(str(action), "compute"):
            if x is not None and torch.is_grad_enabled():
                self._inputs[stage, i] = x.requires_grad_()
            y = self.stages[stage].forward(x, batch, logits=logits)
        if torch.is_grad_enabled():
            self._outputs[stage, i] = get_gradient_edge(y)
        if self._last(stage):
            return y.detach()
        self._ready[Action(stage, Kind.SEND_FORWARD, i)] = y.detach()
        return None

    def _backward(self, action: Action, scale: Tensor, kept: Kept | None = None) -> None:
        """Go back through a stage; the gradients of its weights are left to W if `kept` is one."""
        stage, i = action.stage, action.microbatch
        edge = self._outputs.pop((stage, i))
        last = self._last(stage)
        grad = scale if last else self._take(Action(stage, Kind.RECV_BACKWARD, i))
        reducer = self.stages[stage].reducer
        with self.recorder.span(str(action), "compute"):
            reducer.begin_backward(kept)
            torch.autograd.backward([edge], [grad])
            reducer.end_backward()
        if not self._first(stage):
            x = self._inputs.pop((stage, i))
            if x.grad is None:
                raise RuntimeError(f"backward of stage {stage} left no gradient of its input")
            self._ready[Action(stage, Kind.SEND_BACKWARD, i)] = x.grad

    def _weight_grad(self, action: Action) -> None:
        stage = self.stages[action.stage]
        kept = self._kept.pop((action.stage, action.microbatch))
        with self.recorder.span(str(action), "compute"):
            stage.reducer.begin_backward()
            stage.gradients.do(kept)
            stage.reducer.end_backward()

    def _first(self, stage: int) -> bool:
        """Whether the stage starts a copy of the model."""
        return stage % self._depth == 0

    def _last(self, stage: int) -> bool:
        """Whether the stage ends a copy of the model."""
        return (stage + 1) % self._depth == 0

    def _take(self, action: Action) -> Tensor:
        """What a neighbouring stage made: on this rank it stands ready, else it is on the wire."""
        at_hand = self._ready.pop(other_end(action), None)
        if at_hand is not None:
            return at_hand
        with self.recorder.span(str(action), "wait"):
            return self.wire.take(action)
