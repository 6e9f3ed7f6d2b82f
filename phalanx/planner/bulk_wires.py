"""How long messages of many groups of ranks take: `cost/wires.py`, by column.

Symbols: n ranks of a group, r of them in one domain, S bytes of the full vector.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.core.cluster import Cluster
from phalanx.core.sustained import Sustained
from phalanx.planner.columns import Floats, Integers

Lines = tuple[Floats, Floats, Floats, Floats]


@dataclass(frozen=True)
class Fabric:
    """The links of a cluster at the rates that large collectives reach.

    Attributes:
        domain: ranks in one domain.
        torus: sizes of its axes; empty on a switch.
        near_latency, near: of the links inside a domain, in seconds and bytes/s.
        far_latency, far: of the links between domains.
    """

    domain: int
    torus: tuple[int, ...]
    near_latency: float
    near: float
    far_latency: float
    far: float


def fabric_of(cluster: Cluster, rates: Sustained) -> Fabric:
    """The links of a cluster; see `wires.links`."""
    domain, network = cluster.domain, cluster.accelerator.network
    return Fabric(
        domain=cluster.domain_size,
        torus=cluster.torus if domain.topology == "torus" else (),
        near_latency=domain.link.latency,
        near=domain.link.bandwidth * rates.domain or network.bandwidth,
        far_latency=network.latency,
        far=network.bandwidth * rates.network,
    )


@dataclass(frozen=True)
class Groups:
    """Groups by column: `size` ranks each, `stride` places apart; both are whole numbers."""

    size: Floats
    stride: Floats

    def inside(self, fabric: Fabric) -> Floats:
        """r: how many ranks of each group share one domain."""
        return np.maximum(np.minimum(np.floor(fabric.domain / self.stride), self.size), 1.0)

    def near(self, fabric: Fabric) -> Floats:
        """Bytes/s inside a domain; a torus gives both links of every axis that a group fills."""
        if not fabric.torus:
            return np.array([fabric.near])
        reach = self.size * self.stride
        filled = np.zeros_like(reach)
        for size in np.cumprod(fabric.torus):
            filled += reach >= size
        return fabric.near * 2.0 * np.maximum(filled, 1.0)


def groups_of(size: Integers, stride: Integers) -> Groups:
    """Groups from columns of whole numbers."""
    return Groups(size.astype(np.float64), stride.astype(np.float64))


def send(size: Floats, groups: Groups, fabric: Fabric) -> Floats:
    """Seconds of one message to the next rank of the group."""
    spans = groups.inside(fabric) < groups.size
    latency = np.where(spans, fabric.far_latency, fabric.near_latency)
    time = latency + size / np.where(spans, fabric.far, groups.near(fabric))
    return np.where((groups.size > 1) & (size > 0), time, 0.0)


class Collectives:
    """One collective of many groups, in seconds for any size; see `wires.seconds`.

    A ring or a tree takes a + b S seconds. Inside a domain and across domains the faster of the
    two is taken, and of these the slower.
    """

    def __init__(self, name: str, groups: Groups, fabric: Fabric) -> None:
        n, r = groups.size, groups.inside(fabric)
        latency = fabric.far_latency / r + fabric.near_latency * (1 - 1 / r)
        near = _lines(name, n, np.array([fabric.near_latency]), 1 / groups.near(fabric))
        far = _lines(name, n, latency, 1 / (fabric.far * r))
        self._near = tuple(line * (r > 1) for line in near)
        self._far = tuple(line * (r < n) for line in far)

    def seconds(self, size: Floats) -> Floats:
        """Seconds for `size` bytes of the full vector, which must not be none."""
        near, far = (
            np.minimum(a + b * size, c + d * size) for a, b, c, d in (self._near, self._far)
        )
        slower: Floats = np.maximum(near, far)
        return slower


def _lines(name: str, n: Floats, latency: Floats, slowness: Floats) -> Lines:
    """a, b of a ring, and of a tree: for an all-reduce of two trees with half of it each.

    See `collectives.ring_seconds`, `tree_seconds` and `double_tree_seconds`.
    """
    part, rounds = (n - 1) / n, np.frexp(n - 0.5)[1]  # the logarithm to base 2, rounded up
    if name == "all_reduce":
        ring, tree = 2 * part * slowness, 2 * slowness * (n > 1)
        return 2 * (n - 1) * latency, ring, 2 * rounds * latency, tree
    return (n - 1) * latency, part * slowness, 2 * rounds * latency, (part + rounds) * slowness
