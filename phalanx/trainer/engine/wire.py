"""The wire between pipeline stages: what one stage sends, the next receives.

Sends and receives are issued in the order of the lowered schedule, which every pair of ranks
shares, and waited for only where their tensors are needed.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.trainer.parallel.comm import Group, Pending

_SENDS_UNDER_WAY = 2  # more would keep more activations alive than the schedule promises


class Form(NamedTuple):
    """What crosses between stages: [s/t, b, h] of some dtype, on some device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Wire:
    """Carries activations forward and their gradients back."""

    def __init__(self, group: Group, schedule: Schedule, form: Form) -> None:
        """Connect the ranks of one pipeline.

        Args:
            group: the ranks along pp.
            schedule: lowered; says which rank holds which stage.
            form: of every message.
        """
        self.group, self.schedule, self.form = group, schedule, form
        self._arriving: dict[Action, tuple[Tensor, Pending]] = {}
        self._leaving: deque[Pending] = deque()

    def send(self, action: Action, x: Tensor) -> None:
        """Start to send what stage `action.stage` made: its output, or its input's gradient.

        Args:
            action: SEND_FORWARD or SEND_BACKWARD.
            x: [s/t, b, h], of `form`. Where two are under way already, the older is waited for.
        """
        while len(self._leaving) >= _SENDS_UNDER_WAY:
            self._leaving.popleft().wait()
        forward = action.kind is Kind.SEND_FORWARD
        to = self.schedule.ranks[action.stage + (1 if forward else -1)]
        purpose = "activations" if forward else "activation gradients"
        self._leaving.append(self.group.send(x.contiguous(), to, purpose, self._tag(action)))

    def expect(self, action: Action) -> None:
        """Start to receive what stage `action.stage` needs: its input, or its output's gradient."""
        forward = action.kind is Kind.RECV_FORWARD
        source = self.schedule.ranks[action.stage + (-1 if forward else 1)]
        buffer = torch.empty(self.form.shape, dtype=self.form.dtype, device=self.form.device)
        self._arriving[action] = buffer, self.group.receive(buffer, source, self._tag(action))

    def take(self, action: Action) -> Tensor:
        """Wait for what `expect` started to receive."""
        buffer, pending = self._arriving.pop(action)
        pending.wait()
        return buffer

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._leaving:
            self._leaving.popleft().wait()

    def _tag(self, action: Action) -> int:
        """One number for both ends of a message: its boundary, micro-batch and direction."""
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        sends_up = action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
        boundary = action.stage if sends_up else action.stage - 1
        return (boundary * self.schedule.m + action.microbatch) * 2 + forward
