"""Which links a group of ranks crosses, and how long its collectives take there.

Symbols: n ranks of the group, r of them in one domain.
"""

from typing import NamedTuple

from phalanx.core.cluster import Cluster
from phalanx.core.sustained import Sustained
from phalanx.cost.collectives import Wire, best_seconds, bytes_sent


class Group(NamedTuple):
    """Ranks that communicate: `size` of them, `stride` places apart."""

    size: int
    stride: int

    def inside(self, domain: int) -> int:
        """r: how many of them share one domain of `domain` neighbouring places."""
        return max(min(domain // self.stride, self.size), 1)


class Links(NamedTuple):
    """The links of one group: inside a domain, and beyond it for all its ranks there together."""

    group: Group
    inside: int
    near: Wire
    far: Wire

    @property
    def spans(self) -> bool:
        """Whether the group leaves one domain."""
        return self.inside < self.group.size


def links(cluster: Cluster, rates: Sustained, group: Group) -> Links:
    """The links that a group crosses, at the rates that large collectives reach.

    A torus gives a group both links of every axis that it fills.
    """
    domain, network = cluster.domain, cluster.accelerator.network
    near = domain.link.bandwidth * rates.domain * _axes(cluster, group)
    return Links(
        group,
        group.inside(cluster.domain_size),
        Wire(domain.link.latency, near or network.bandwidth),
        Wire(network.latency, network.bandwidth * rates.network),
    )


def _axes(cluster: Cluster, group: Group) -> float:
    if cluster.domain.topology != "torus":
        return 1.0
    filled, size = 0, 1
    for axis in cluster.torus:
        size *= axis
        filled += group.size * group.stride >= size
    return 2.0 * max(filled, 1)


def seconds(name: str, size: float, on: Links) -> float:
    """Time of one collective: the slower of its ring inside domains and the one across.

    The ring enters and leaves a domain over the scale-out links of all r ranks that the group has
    there. In an all-to-all every rank uses its own.

    Args:
        name: of the collective, see `collectives.NAMES`; or "send".
        size: bytes of the full vector; of the message for "send".
        on: the links.
    """
    n, r = on.group.size, on.inside
    if n == 1 or size <= 0:
        return 0.0
    if name == "send":
        wire = on.far if on.spans else on.near
        return wire.latency + size / wire.bandwidth
    near = best_seconds(name, size, n, on.near)[0] if r > 1 else 0.0
    if not on.spans:
        return near
    if name == "all_to_all":
        beyond = size * (n - r) / n
        return max(
            bytes_sent(name, size, r) * r / n / on.near.bandwidth if r > 1 else 0.0,
            (n // r - 1) * on.far.latency + beyond / on.far.bandwidth,
        )
    across = Wire(on.far.latency / r + on.near.latency * (1 - 1 / r), on.far.bandwidth * r)
    return max(near, best_seconds(name, size, n, across)[0])
