"""Delayed scaling: a tensor's scale follows the largest values that it had in past steps.

So nothing has to be looked at twice before it is rounded, and no message waits. Within a step
all scales stand still. The largest values are agreed on once, when the step ends. The first
step of a run has no history: it multiplies unrounded and only takes notes.
Source: Transformer Engine's recipe `DelayedScaling`, with its history of 1,024 steps and the
largest of them; it lets the first step calibrate too (`fp8_autocast`, `calibrating`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.precision.formats import Format
from phalanx.trainer.precision.per_tensor import scale_for

LENGTH = 1024
KINDS = ("input", "weight", "gradient")


class AmaxHistory:
    """The largest magnitudes of every scaled tensor on one rank, by step.

    Attributes:
        names: of the projections, in the order in which they were made.
        steps: how many are noted; 0 means that nothing has a scale yet.
        values: fp32 [LENGTH, 3 n], the newest step first; three kinds of tensors for each name.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        """Start without a history.

        Args:
            groups: over which the parts of a tensor, and its micro-batches, are spread.
            device: where tensors live.
        """
        self.groups, self.device = groups, device
        self.names: list[str] = []
        self.steps = 0
        self.values = self._now = self._largest = torch.empty(0)

    def of(self, name: str) -> tuple["Delayed", "Delayed", "Delayed"]:
        """What scales the input, the weight and the output's gradient of a projection."""
        self.names.append(name)
        size = len(KINDS) * len(self.names)
        self.values = torch.zeros(LENGTH, size, device=self.device)
        self._now = torch.zeros(size, device=self.device)
        self._largest = torch.zeros(size, device=self.device)
        first, second, third = (Delayed(self, size - k) for k in (3, 2, 1))
        return first, second, third

    def of_name(self, name: str) -> Tensor:
        """The history of a projection, [LENGTH, 3]; a view."""
        first = self.names.index(name) * len(KINDS)
        return self.values[:, first : first + len(KINDS)]

    def note(self, slot: int, x: Tensor) -> None:
        """Keep a tensor's largest magnitude, if this step has not noted a larger one in its slot.

        Args:
            slot: the tensor's column of `values`.
            x: this rank's part of it, of any shape.
        """
        amax = torch.linalg.vector_norm(x, torch.inf).float()
        self._now[slot] = torch.maximum(self._now[slot], amax)

    def largest(self, slot: int) -> Tensor | None:
        """The largest magnitude in the history, or None before there is one."""
        return self._largest[slot] if self.steps else None

    def begin_step(self) -> None:
        """Forget what validation may have noted since the last step."""
        self._now.zero_()

    def finish_step(self) -> None:
        """Agree on this step's largest values, and let the next step's scales follow.

        A step that overflowed leaves no trace of it.
        """
        if not self.names:
            return
        now = torch.where(self._now.isfinite(), self._now, 0.0)
        for group in self.groups:
            group.all_reduce(now, "amax", largest=True).wait()
        self.values = torch.cat([now.unsqueeze(0), self.values[:-1]])
        self.take_up(self.steps + 1)

    def take_up(self, steps: int) -> None:
        """Let the scales follow the history as it stands, after so many steps."""
        self.steps = steps
        if self.names:
            self._largest = self.values.amax(0)


@dataclass(frozen=True)
class Delayed:
    """Scales one tensor by its history."""

    history: AmaxHistory
    slot: int

    def __call__(self, x: Tensor, to: Format) -> Tensor | None:
        """The scale that this step has fixed; takes note of the tensor for the next."""
        self.history.note(self.slot, x)
        largest = self.history.largest(self.slot)
        return None if largest is None else scale_for(largest, to)
