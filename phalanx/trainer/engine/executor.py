"""Obeys a schedule: takes one rank's row of actions and does them in order, no more and no less."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.core.errors import PhalanxError
from phalanx.core.schedule import Action, Kind, Row
from phalanx.schedules.messages import other_end
from phalanx.schedules.placement import placement_of
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.engine.update import UpdateRule
from phalanx.trainer.engine.weight_gradients import Deferred
from phalanx.trainer.engine.wire import Wire
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.stage import Stage

SHOWN = 6  # actions of a row before and after one that failed


class ActionError(RuntimeError):
    """An action of the schedule failed; the cause is chained."""

    def __init__(self, rank: int, row: Row, place: int, error: Exception) -> None:
        """Show the row with the place marked.

        Args:
            rank: of the pipeline.
            row: what it does.
            place: of the action in the row.
            error: the cause.
        """
        first, last = max(place - SHOWN, 0), place + SHOWN + 1
        shown = [f">{a}<" if i == place else str(a) for i, a in enumerate(row)][first:last]
        before, after = "... " * (first > 0), " ..." * (last < len(row))
        cause = f"{type(error).__name__}: {error}"
        marked = f"{before}{' '.join(shown)}{after}"
        super().__init__(f"pipeline rank {rank} failed at {row[place]}: {marked}; {cause}")


class Executor:
    """Runs the stages of one rank.

    Attributes:
        stages: by index, those that this rank holds.
        wire: to the ranks that hold the others; its schedule is the one obeyed.
        rule: says which weights a micro-batch meets.
        row: what this rank does.
    """

    def __init__(
        self, stages: Mapping[int, Stage], wire: Wire, recorder: Recorder, rule: UpdateRule
    ) -> None:
        self.stages, self.wire, self.recorder, self.rule = stages, wire, recorder, rule
        self.row = wire.schedule.rows[wire.group.index]
        self._placement = placement_of(wire.schedule)
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], GradientEdge] = {}
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._ready: dict[Action, Tensor] = {}

    def run(self, batches: Sequence[MicroBatch], scale: Tensor) -> list[Tensor]:
        """Do the whole row.

        Args:
            batches: the micro-batches that its actions number.
            scale: gradient of the update's loss by the summed loss, 1 / valid tokens: a number,
                or [m], one for each micro-batch.

        Returns:
            The summed loss of each micro-batch whose last stage this rank holds, in the order of
            the row.

        Raises:
            ActionError: an action failed for a reason that is not the user's.
        """
        scales = scale.expand(len(batches))
        losses = []
        for place, action in enumerate(self.row):
            try:
                loss = self._do(action, batches, scales)
            except (PhalanxError, OSError):  # what a user can mend is said in its own words
                raise
            except Exception as error:
                raise ActionError(self.wire.group.index, self.row, place, error) from error
            if loss is not None:
                losses.append(loss)
        with self.recorder.span("finish", "communicate"):
            self.wire.finish()
        return losses

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

    def _do(self, action: Action, batches: Sequence[MicroBatch], scales: Tensor) -> Tensor | None:
        """Do one action; the forward of the last stage returns its loss."""
        i = action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self.rule.before_forward(i)
                return self._forward(action, batches[i])
            case Kind.BACKWARD:
                with self.rule.around_backward(i):
                    self._backward(action, scales[i])
            case Kind.INPUT_GRAD:
                with self.stages[action.stage].gradients.deferring() as deferred:
                    self._backward(action, scales[i], deferred)
                self._deferred[action.stage, i] = deferred
            case Kind.WEIGHT_GRAD:
                self._weight_grad(action)
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                with self.recorder.span(str(action), "communicate"):
                    self.wire.send(action, self._ready.pop(action))
            case Kind.RECV_FORWARD | Kind.RECV_BACKWARD:
                with self.recorder.span(str(action), "communicate"):
                    self.wire.expect(action)
            case Kind.REDUCE:
                self.stages[action.stage].reducer.enable()
        return None

    def _forward(self, action: Action, batch: MicroBatch, *, logits: bool = False) -> Tensor | None:
        stage, i = action.stage, action.microbatch
        x = (
            None
            if self._placement.begins(stage)
            else self._take(Action(stage, Kind.RECV_FORWARD, i))
        )
        with self.recorder.span(str(action), "compute"):
            if x is not None and torch.is_grad_enabled():
                self._inputs[stage, i] = x.requires_grad_()
            y = self.stages[stage].forward(x, batch, logits=logits)
        if torch.is_grad_enabled():
            self._outputs[stage, i] = get_gradient_edge(y)
        if self._placement.ends(stage):
            return y.detach()
        self._ready[Action(stage, Kind.SEND_FORWARD, i)] = y.detach()
        return None

    def _backward(self, action: Action, scale: Tensor, deferred: Deferred | None = None) -> None:
        """Go back through a stage; gradients of its weights are left to W, in `deferred`."""
        stage, i = action.stage, action.microbatch
        edge = self._outputs.pop((stage, i))
        last = self._placement.ends(stage)
        grad = scale if last else self._take(Action(stage, Kind.RECV_BACKWARD, i))
        reducer = self.stages[stage].reducer
        with self.recorder.span(str(action), "compute"):
            reducer.begin_backward(deferred)
            torch.autograd.backward([edge], [grad])
            reducer.end_backward()
        if not self._placement.begins(stage):
            x = self._inputs.pop((stage, i))
            if x.grad is None:
                raise RuntimeError(f"backward of stage {stage} left no gradient of its input")
            self._ready[Action(stage, Kind.SEND_BACKWARD, i)] = x.grad

    def _weight_grad(self, action: Action) -> None:
        stage = self.stages[action.stage]
        deferred = self._deferred.pop((action.stage, action.microbatch))
        with self.recorder.span(str(action), "compute"):
            stage.reducer.begin_backward()
            stage.gradients.do(deferred)
            stage.reducer.end_backward()

    def _take(self, action: Action) -> Tensor:
        """What a neighbouring stage made: on this rank it stands ready, else it is on the wire."""
        at_hand = self._ready.pop(other_end(action), None)
        if at_hand is not None:
            return at_hand
        with self.recorder.span(str(action), "wait"):
            return self.wire.take(action)
