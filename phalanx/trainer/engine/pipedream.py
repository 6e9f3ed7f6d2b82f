"""PipeDream: every backward moves the weights of its stage at once, and nothing waits for anything.

A stage goes forward with the newest weights that it has. Until a micro-batch comes back they may
have moved; its backward then uses the weights of its forward (weight stashing), and its gradient
is applied to newer ones. So each micro-batch is an update of its own, with a gradient that is a
few updates stale on early stages: the update differs from that of one device by design.
Source: Narayanan et al. 2019 (SOSP; Harlap et al., arXiv:1806.03377), sections 3.2 and 3.3.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from phalanx.trainer.engine.optimizer import PendingScalar, global_norm
from phalanx.trainer.engine.update import Update, Updated, UpdateRule
from phalanx.trainer.parallel.data import ShardedUnit


class WeightStashing(UpdateRule):
    """Moves the weights of one stage after every backward, and stashes those still needed."""

    each_micro_batch = True

    def __init__(self, updated: Updated, units: Sequence[ShardedUnit]) -> None:
        """Start with the weights as they are.

        Args:
            updated: what an update is made of.
            units: of the stage that this rank holds.
        """
        self.updated, self._units = updated, units
        self._version = 0
        self._used: dict[int, int] = {}  # by micro-batch in flight: the version it went out with
        self._stash: dict[int, list[Tensor]] = {}

    @property
    def stashed(self) -> int:
        """Versions of the weights that are held beside the newest."""
        return len(self._stash)

    def before_forward(self, microbatch: int) -> None:
        """The micro-batch goes out with the newest weights."""
        self._used[microbatch] = self._version

    @contextmanager
    def around_backward(self, microbatch: int) -> Iterator[None]:
        """Inside, the stage has the weights of the micro-batch's forward; then they move."""
        version = self._used.pop(microbatch)
        with self._weights_of(version):
            yield
        if version not in self._used.values():
            self._stash.pop(version, None)
        for unit in self._units:
            unit.finish()
        if self._version in self._used.values():
            self._stash[self._version] = self._copies()
        with self.updated.recorder.span(f"update {microbatch}", "optimizer"):
            self.updated.optimizer.step()
        self._version += 1

    def finish(self, loss: PendingScalar) -> Update:
        """All has moved. The norm is that of the last micro-batch's gradient.

        Nothing is clipped or skipped: that would need what other stages have not done yet.
        """
        updated, mean = self.updated, loss()
        norm = global_norm(updated.units, updated.world, updated.recipe.clip_norm)
        return Update(mean, norm, skipped=not math.isfinite(mean + norm))

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
