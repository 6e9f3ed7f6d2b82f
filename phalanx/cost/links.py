"""Which links groups of ranks cross, and how long their messages take there.

Symbols: n ranks of a group, r of them in one domain, S bytes of the full vector.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.core.cluster import Cluster, MeasuredCollective
from phalanx.core.sustained import Sustained
from phalanx.cost.collectives import Line, LinkRate, bytes_sent, double_tree, ring
from phalanx.cost.table import Column


@dataclass(frozen=True)
class Fabric:
    """The links of a cluster at the rates that large collectives reach.

    Attributes:
        domain: neighbouring ranks that share one fast fabric.
        torus: sizes of its axes; empty on a switch.
        near: of one link inside a domain.
        far: of the link of one rank to other domains.
        host: of the link of one rank to the memory of its host.
        measured: collectives inside a domain whose time is known.
    """

    domain: int
    torus: tuple[int, ...]
    near: LinkRate
    far: LinkRate
    host: LinkRate
    measured: tuple[MeasuredCollective, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, rates: Sustained) -> "Fabric":
        """The links of a cluster; one that has no links inside domains uses the network.

        Args:
            cluster: its domains, and of its accelerator the network and the host link.
            rates: the shares of both bandwidths that large collectives reach.
        """
        domain, device = cluster.domain, cluster.accelerator
        near = domain.link.bandwidth * rates.domain or device.network.bandwidth
        return cls(
            domain=cluster.domain_size,
            torus=cluster.torus if domain.topology == "torus" else (),
            near=LinkRate(domain.link.latency, near),
            far=LinkRate(device.network.latency, device.network.bandwidth * rates.network),
            host=LinkRate(device.host.latency, device.host.sustained or device.host.bandwidth),
            measured=device.collectives,
        )


class RankGroup(NamedTuple):
    """Ranks that communicate, one group of each row.

    Attributes:
        size: how many, a column.
        stride: how many places apart, a column; a domain is a run of neighbouring places.
    """

    size: Column
    stride: Column

    def inside(self, fabric: Fabric) -> Column:
        """r: how many of them share one domain, at least 1."""
        return np.maximum(np.minimum(fabric.domain // self.stride, self.size), 1)

    def near(self, fabric: Fabric) -> LinkRate:
        """The links inside a domain; a torus gives both of every axis that a group fills."""
        if not fabric.torus:
            return fabric.near
        filled = sum(self.size * self.stride >= size for size in np.cumprod(fabric.torus).tolist())
        axes = 2.0 * np.maximum(filled, 1)
        return fabric.near._replace(bandwidth=fabric.near.bandwidth * axes)


class Path:
    """A collective of some groups: seconds for any number of bytes.

    What was measured is taken as it is. Else the slower of two clocks: of the algorithm inside
    domains, and of the one across, whose ring enters and leaves a domain over the links of all r
    ranks that the group has there. In an all-to-all every rank uses its own link.

    Args:
        name: of the collective, see `collectives.NAMES`; or "send" to the next rank.
        group: who takes part.
        fabric: what they cross.
    """

    def __init__(self, name: str, group: RankGroup, fabric: Fabric) -> None:
        n, r = group.size, group.inside(fabric)
        near, far = group.near(fabric), fabric.far
        self._alone = n == 1
        self._measured = [
            (_is_as(each, n, r), Line(each.latency, 1 / each.bandwidth))
            for each in fabric.measured
            if each.name == name
        ]
        self._lines: list[tuple[Line, Line]] = []
        if name == "send":
            rate: Column = np.where(r < n, far.bandwidth, near.bandwidth)
            line = Line(np.where(r < n, far.latency, near.latency), 1 / rate)
            self._lines.append((line, line))
            return
        self._lines.append(_two(name, n, near, r > 1))
        if name == "all_to_all":
            within = _only(Line(0.0, bytes_sent(name, 1.0, r) * r / n / near.bandwidth), r < n)
            ring_of, tree_of = self._lines[0]
            self._lines[0] = _only(ring_of, r >= n), _only(tree_of, r >= n)
            across = _only(Line((n // r - 1) * far.latency, (n - r) / n / far.bandwidth), r < n)
            self._lines += [(within, within), (across, across)]
            return
        together = LinkRate(far.latency / r + near.latency * (1 - 1 / r), far.bandwidth * r)
        self._lines.append(_two(name, n, together, r < n))

    def seconds(self, size: Column) -> Column:
        """Seconds for `size` bytes of the full vector, a column; of the message for a send.

        Nothing takes no time, and neither does a group of one.
        """
        clocks = [_faster(lines, size) for lines in self._lines]
        slower = clocks[0]
        for clock in clocks[1:]:
            slower = np.maximum(slower, clock)
        for where, line in self._measured:
            slower = np.where(where, line.at(size), slower)
        return np.where(self._alone | (np.asarray(size) <= 0), 0.0, slower)


def _is_as(measured: MeasuredCollective, n: Column, r: Column) -> Column:
    """Where a group is as the one that was measured; of a send, where neighbours are near."""
    return r > 1 if measured.name == "send" else (n == measured.ranks) & (r >= n)


def _two(name: str, n: Column, link: LinkRate, where: Column) -> tuple[Line, Line]:
    """The algorithms that libraries choose between, where the links are crossed."""
    return _only(ring(name, n, link), where), _only(double_tree(name, n, link), where)


def _only(line: Line, where: Column) -> Line:
    return Line(line.fixed * where, line.per_byte * where)


def _faster(lines: tuple[Line, Line], size: Column) -> Column:
    first, second = lines
    if first is second:
        return first.at(size)
    return np.minimum(first.at(size), second.at(size))


def seconds(name: str, size: Column, group: RankGroup, fabric: Fabric) -> Column:
    """Time of one message of each group; see `Path`, which keeps what does not depend on the size.

    Args:
        name: of the collective, one of `collectives.NAMES`; or "send" to the next rank.
        size: bytes of the full vector, a column; of the message for a send.
        group: who takes part.
        fabric: what they cross.

    Returns:
        Seconds, a column; 0 for a group of one, and for nothing to send.

    Raises:
        UsageError: an unknown collective, or a group without ranks.

    Example:
        Over two domains of 8, whose ring crosses by all their links at once: 8e9 (15/16) / 400e9.

        >>> near, far = LinkRate(0.0, 450e9), LinkRate(0.0, 50e9)
        >>> fabric = Fabric(domain=8, torus=(), near=near, far=far, host=far)
        >>> float(seconds("all_gather", 8e9, RankGroup(16, 1), fabric))
        0.01875
    """
    return Path(name, group, fabric).seconds(size)
