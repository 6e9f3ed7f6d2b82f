"""Evens out the load of experts from step to step, without a loss: by biases on their scores.

After each update the bias of every expert moves by a fixed amount, up where fewer tokens chose it
than on average and down where more did (Wang et al. 2024, arXiv:2408.15664, section 3). The load
is that of the whole global batch, so every layout moves the biases alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.trainer.model.experts import Router
from phalanx.trainer.parallel.mesh import Mesh


class ExpertLoad(NamedTuple):
    """How evenly experts were used in a step, in the worst layer of those that this rank holds.

    Attributes:
        busiest: visits of the busiest expert, over those of an even load; 0 without experts.
        dropped: share of the visits that found their expert full.
    """

    busiest: float = 0.0
    dropped: float = 0.0


class Balancer:
    """The routers of one rank, and what the whole batch asked of their experts.

    Attributes:
        routers: of this rank, in one order on all ranks that have their layers.
        load: of the last step.
    """

    def __init__(self, routers: Sequence[Router], speed: float, mesh: Mesh) -> None:
        """Take over the routers.

        Args:
            routers: of this rank's layers.
            speed: how far a bias moves in a step; 0 leaves them alone.
            mesh: its ranks along data route the other tokens of the batch, and the replicas of its
                stages those that go the other way.
        """
        self.routers = sorted(routers, key=lambda router: router.prefix)
        self.speed, self.mesh = speed, mesh
        for router in self.routers:
            router.place(mesh.device)
        self.load = ExpertLoad()
        self._visits: list[Tensor] = []

    def reduce(self) -> None:
        """Add up whom the tokens of all ranks chose in this step, in one message."""
        if not self.routers:
            return
        seen = torch.stack([router.take_seen() for router in self.routers])
        self.mesh.data.all_reduce(seen, "expert loads").wait()
        self.mesh.pipeline_replicas.all_reduce(seen, "expert loads both ways").wait()
        visits, dropped = seen[:, :-1], seen[:, -1]
        self._visits = list(visits)
        total = visits.sum(1).clamp(min=1)
        busiest = (visits.amax(1) * visits.shape[1] / total).max()
        self.load = ExpertLoad(busiest.item(), (dropped / total).max().item())

    def move(self) -> None:
        """Move the biases by what `reduce` found."""
        if not self.speed:
            return
        for router, visits in zip(self.routers, self._visits, strict=True):
            router.bias += self.speed * torch.sign(visits.mean() - visits)
