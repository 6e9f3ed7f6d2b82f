"""Wrong arithmetic: a step's passes done twice, which give the same bits or somebody is wrong.

What is compared is the gradient of each rank before it is added to those of others, so that the
rank is known where only its own differs; and the reduced one, where a message was wrong. A rank
that is wrong in the same way each time is not found.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.batches import Batch
from phalanx.schedules.layouts import is_asynchronous
from phalanx.trainer import faults
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.engine.step import StepResult, passes, update
from phalanx.trainer.guard.corruption import Suspicion, agree_on, checksum


class PassSums(NamedTuple):
    """What one rank's passes of a step came to.

    Attributes:
        own: of its gradients before they were reduced.
        reduced: of those that the update reads.
    """

    own: list[Tensor]
    reduced: list[Tensor]


class PassRepeat:
    """Does the passes of every so many steps twice.

    Attributes:
        every: steps between two repeats; 0 never repeats.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.every = 0 if is_asynchronous(engine.run.layout) else engine.run.recipe.repeat_every

    def is_due(self, step: int) -> bool:
        """Whether the passes of `step` are done twice, counted from 0."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def step(self, step: int, batch: Batch) -> StepResult | Suspicion:
        """Take a step whose passes are done twice; every rank calls it.

        Args:
            step: from 0.
            batch: the sequences at `engine.positions()`.

        Returns:
            What it did; or who is suspected, on every rank alike, and then no weight has moved.
        """
        engine, history = self._engine, self._engine.arithmetic.history
        with self._listening() as sums:
            before = (history.values, history.steps)
            passes(engine, step, batch)()
            first = PassSums(list(sums), self._reduced())
            history.values = before[0]
            history.take_up(before[1])
        with self._listening() as sums:
            loss = passes(engine, step, batch)
            faults.point("step.before_update", step=step, tensors=self._gradients)
            second = PassSums(list(sums), self._reduced())
        own = _differ(first.own, second.own)
        found = agree_on(engine.mesh, _suspicion(first, second, own=own), certain=own)
        return update(engine, loss) if found is None else found

    @contextmanager
    def _listening(self) -> Iterator[list[Tensor]]:
        """Inside, the checksum of each gradient that is about to be reduced is collected."""
        sums: list[Tensor] = []
        for unit in self._engine.units:
            unit.on_reduce = lambda whole: sums.append(checksum(whole))
        try:
            yield sums
        finally:
            for unit in self._engine.units:
                unit.on_reduce = None

    def _gradients(self) -> dict[str, Tensor]:
        return {f"gradient:{u.unit.name}": u.unit.grad for u in self._engine.units}

    def _reduced(self) -> list[Tensor]:
        return [checksum(gradient) for u in self._engine.units for gradient in u.gradients()]


def _suspicion(first: PassSums, second: PassSums, *, own: bool) -> Suspicion | None:
    """What differs on this rank between the two times: its own part, or only what was reduced."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if own:
        return Suspicion((rank,), "the same passes gave it other gradients the second time")
    if _differ(first.reduced, second.reduced):
        return Suspicion((rank,), "the same gradients were reduced to others the second time")
    return None


def _differ(first: list[Tensor], second: list[Tensor]) -> bool:
    return bool((torch.stack(first) != torch.stack(second)).any().item())
