"""Wrong arithmetic: passes done twice, here or on a neighbour, give the same bits or one is wrong.

What is compared is the gradient of each rank before it is added to those of others. Every second
time a rank does its own passes again: where the two differ, the rank has been wrong once. The other
times it does those of the next rank along dp, which holds the same weights: that also finds a rank
that is wrong in the same way each time. Then every rank does its own again with each product held
against its checksum. Who differs from itself, or has a wrong product, is to blame; else the replica
that is part of every disagreement, of which there is one where there are three or more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.layout import Layout
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
        layout = engine.run.layout
        self._engine = engine
        self.every = 0 if is_asynchronous(layout) else engine.run.recipe.repeat_every
        self._has_neighbour = layout.dp > 1 and layout.ep == 1  # experts see tokens of all ranks

    def is_due(self, step: int) -> bool:
        """Whether the passes of `step` are done twice, counted from 0."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def step(
        self, step: int, batch: Batch, read: Callable[[int, Sequence[int]], Batch]
    ) -> StepResult | Suspicion:
        """Take a step whose passes are done twice; every rank calls it.

        Args:
            step: from 0.
            batch: the sequences at `engine.positions()`.
            read: gives the sequences of a step at other positions.

        Returns:
            What it did; or who is suspected, on every rank alike, and then no weight has moved.
        """
        elsewhere = self._has_neighbour and step // self.every % 2 == 0
        positions = self._engine.positions(ahead=int(elsewhere))
        first = self._undone(step, read(step, positions) if elsewhere else batch, positions)
        with self._listening() as sums:
            loss = passes(self._engine, step, batch)
            faults.point("step.before_update", step=step, tensors=self._gradients)
            second = PassSums(list(sums), self._reduced())
        if elsewhere:
            found = self._unlike_neighbour(step, batch, first, second)
        else:
            own = _differ(first.own, second.own)
            suspicion = _suspicion(first, second, own=own)
            found = agree_on(self._engine.mesh, suspicion, certain=own)
        return update(self._engine, loss) if found is None else found

    def _undone(self, step: int, batch: Batch, positions: range) -> PassSums:
        """Do passes of which nothing stays."""
        history = self._engine.arithmetic.history
        with self._listening() as sums:
            before = (history.values, history.steps)
            passes(self._engine, step, batch, positions)()
            found = PassSums(list(sums), self._reduced())
            history.values = before[0]
            history.take_up(before[1])
        return found

    def _unlike_neighbour(
        self, step: int, batch: Batch, other: PassSums, mine: PassSums
    ) -> Suspicion | None:
        """Compare what each rank came to with what the one before it along dp came to for it."""
        mesh = self._engine.mesh
        pair = torch.stack([_all_of(mine.own), _all_of(other.own)])
        everyone = pair.new_empty(2 * mesh.world.size)
        mesh.world.all_gather(everyone, pair, "gradient checksums").wait()
        replicas = disagreeing(everyone.view(-1, 2).tolist(), mesh.layout)
        if not replicas:
            return None
        sampler = self._engine.arithmetic.sampler
        sampler.found()
        with sampler.looking_at_all():
            again = self._undone(step, batch, self._engine.positions())
        what = sampler.found()
        if _differ(mine.own, again.own):
            what = "the same passes gave it other gradients the second time"
        if what:
            named: Suspicion | None = Suspicion((_rank(),), what)
        else:
            ranks = range(mesh.layout.ranks)
            of = tuple(rank for rank in ranks if mesh.layout.coordinates(rank).dp in replicas)
            named = Suspicion(of, "the same passes give others elsewhere, on the same weights")
        return agree_on(mesh, named, certain=bool(what))

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
    if own:
        return Suspicion((_rank(),), "the same passes gave it other gradients the second time")
    if _differ(first.reduced, second.reduced):
        return Suspicion((_rank(),), "the same gradients were reduced to others the second time")
    return None


def _differ(first: list[Tensor], second: list[Tensor]) -> bool:
    return bool((torch.stack(first) != torch.stack(second)).any().item())


def disagreeing(sums: Sequence[Sequence[int]], layout: Layout) -> set[int]:
    """Which replicas along dp may be wrong, since one has come to something else than its checker.

    Args:
        sums: of each rank, what its own passes came to, and what it came to for the next along dp.
        layout: says who that is.

    Returns:
        Those that are part of every disagreement; all that are part of one where there is no such;
        none where nobody disagrees.
    """
    pairs = set()
    for rank, (_, for_next) in enumerate(sums):
        at = layout.coordinates(rank)
        after = (at.dp + 1) % layout.dp
        if sums[layout.rank_at(at._replace(dp=after))][0] != for_next:
            pairs.add(frozenset((at.dp, after)))
    return set(frozenset.intersection(*pairs) or frozenset.union(*pairs)) if pairs else set()


def _all_of(sums: list[Tensor]) -> Tensor:
    """One checksum of several."""
    return checksum(torch.stack(sums))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
