"""What a collective operation sends, and how long it takes in the latency-bandwidth model.

Symbols: p ranks of the group, S bytes of the full vector, α latency of one message, B bandwidth
of one rank, one way.
"""

from typing import Literal, NamedTuple

import numpy as np

from phalanx.core.errors import UsageError
from phalanx.cost.table import Column

Name = Literal[
    "broadcast",
    "scatter",
    "gather",
    "all_gather",
    "reduce",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
]

NAMES: tuple[Name, ...] = (
    "broadcast",
    "scatter",
    "gather",
    "all_gather",
    "reduce",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
)


class LinkRate(NamedTuple):
    """What one rank sees of the network."""

    latency: Column  # α, seconds
    bandwidth: Column  # B, bytes/s one way


class Line(NamedTuple):
    """What an algorithm takes: fixed seconds for its rounds, and seconds for every byte of S."""

    fixed: Column
    per_byte: Column

    def at(self, S: Column) -> Column:
        """Seconds for a vector of S bytes."""
        return self.fixed + self.per_byte * S


class Level(NamedTuple):
    """One level of a tree of switches: how many children, and how fast each is joined.

    A child of the lowest level is a rank, of the next one a domain, and so on.
    """

    degree: int
    bandwidth: float  # bytes/s one way, between one child and this level


def bytes_sent(name: str, S: Column, p: Column) -> Column:
    """Bytes that the busiest rank sends, at the least.

        all_reduce                                     2 S (p-1)/p
        all_gather, reduce_scatter, all_to_all           S (p-1)/p
        scatter (from the root), gather (into it)        S (p-1)/p
        broadcast, reduce (every rank passes it on)      S

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations"; Chan et al. 2007, "Collective communication: theory, practice, and experience",
    table 2.

    Args:
        name: of the collective, one of `NAMES`.
        S: bytes of the full vector, a column: what is reduced, or the gathered result; for
            all_to_all, what one rank holds.
        p: ranks of the group, a column; a group of one sends nothing.

    Raises:
        UsageError: an unknown collective, or a group without ranks.

    Example:
        >>> bytes_sent("all_reduce", 8e9, 8)
        14000000000.0
    """
    _known(name, p)
    if name in ("broadcast", "reduce"):
        return S * (p > 1)
    return (2.0 if name == "all_reduce" else 1.0) * S * (p - 1) / p


def ring(name: str, p: Column, link: LinkRate) -> Line:
    """Time round a ring, p - 1 messages of S/p one after the other.

        all_reduce      2 (p-1) α + 2 (p-1)/p S/B
        all_gather, reduce_scatter, all_to_all, scatter, gather
                          (p-1) α +   (p-1)/p S/B
        broadcast, reduce (p-1) α +          S/B    pipelined in many pieces

    Optimal in bytes, not in rounds. Source: Patarasuk and Yuan 2009, section 3.

    Args:
        name: of the collective, one of `NAMES`.
        p: ranks of the group, a column.
        link: α and B between neighbours.

    Raises:
        UsageError: an unknown collective, or a group without ranks.
    """
    rounds = (2 if name == "all_reduce" else 1) * (p - 1)
    return Line(rounds * link.latency, bytes_sent(name, 1.0, p) / link.bandwidth)


def tree(name: str, p: Column, link: LinkRate) -> Line:
    """Time over a binomial tree, in r = ceil(log2 p) rounds: fewer rounds, more bytes.

        broadcast, reduce           r (α + S/B)
        all_reduce                2 r (α + S/B)          reduce, then broadcast
        scatter, gather             r α + (p-1)/p S/B
        all_gather                2 r α + (p-1)/p S/B + r S/B    gather, then broadcast
        reduce_scatter            2 r α + r S/B + (p-1)/p S/B    reduce, then scatter
        all_to_all                  r (α + S/(2B))       Bruck et al. 1997

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH", sections 3 and 4.

    Args:
        name: of the collective, one of `NAMES`; others are not told from all_gather.
        p: ranks of the group, a column of at least 1.
        link: α and B between any two of them.
    """
    r, alpha, beta = _rounds(p), link.latency, 1.0 / link.bandwidth
    part = beta * (p - 1) / p
    match name:
        case "broadcast" | "reduce":
            return Line(r * alpha, r * beta)
        case "all_reduce":
            return Line(2 * r * alpha, 2 * r * beta)
        case "scatter" | "gather":
            return Line(r * alpha, part)
        case "all_to_all":
            return Line(r * alpha, r * beta / 2)
        case _:
            return Line(2 * r * alpha, r * beta + part)


def double_tree(name: str, p: Column, link: LinkRate) -> Line:
    """Time over two complementary trees, each carrying half in many pieces, as NCCL does it.

        all_reduce        2 r α + 2 S/B
        broadcast, reduce   r α +   S/B

    Rounds of a tree at nearly the bytes of a ring. The rest is a plain tree. Source: Sanders,
    Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".

    Args:
        name: of the collective, as in `tree`.
        p: ranks of the group, a column of at least 1; a group of one takes no time.
        link: α and B between any two of them.
    """
    if name not in ("all_reduce", "broadcast", "reduce"):
        return tree(name, p, link)
    passes = 2 * (p > 1) if name == "all_reduce" else 1 * (p > 1)
    return Line(passes * _rounds(p) * link.latency, passes / link.bandwidth)


def ring_seconds(name: str, S: float, p: int, link: LinkRate) -> float:
    """Seconds of `ring`, for one vector and one group.

    Args:
        name: of the collective, one of `NAMES`.
        S: bytes of the full vector.
        p: ranks of the group.
        link: α and B between neighbours.

    Raises:
        UsageError: an unknown collective, or a group without ranks.

    Example:
        >>> ring_seconds("all_gather", 8e9, 8, LinkRate(latency=0.0, bandwidth=70e9))
        0.1
    """
    return float(ring(name, p, link).at(S))


def best_seconds(name: str, S: Column, p: Column, link: LinkRate) -> Column:
    """Seconds of the faster of ring and tree; no plain tree beats its double.

    Small vectors and many ranks go to trees; large vectors to the ring.

    Args:
        name: of the collective, one of `NAMES`.
        S: bytes of the full vector, a column.
        p: ranks of the group, a column.
        link: α and B between any two of them.

    Raises:
        UsageError: an unknown collective, or a group without ranks.
    """
    return np.minimum(ring(name, p, link).at(S), double_tree(name, p, link).at(S))


def _rounds(p: Column) -> Column:
    """The logarithm to base 2, rounded up without the error of a logarithm."""
    return np.frexp(np.asarray(p, dtype=np.float64) - 0.5)[1]


def in_network_seconds(S: float, link: LinkRate, gain: float = 1.3) -> float:
    """Seconds of an all-reduce that the switches add up (SHARP): 2 S / (gain B), and two messages.

    In theory every rank sends S once, a gain near 2; measured on H100 nodes it is about 1.3.
    Source: scaling book, chapter 12, "In network reductions".

    Args:
        S: bytes of the vector.
        link: α and B of one rank to its switch.
        gain: over a ring, whose ranks send 2 S.
    """
    return float(2 * link.latency + 2 * S / (gain * link.bandwidth))


def gather_bandwidth(levels: tuple[Level, ...], inner: int = 1) -> float:
    """Bytes/s at which S bytes are all-gathered or reduce-scattered over a tree of switches.

    Every level runs its own ring at the same time as the others, so the slowest one rules:

        T = S max_i [ (D_i - 1) / (D_i W_i max(1, Y/n_{i-1})) ]

    with D_i children at level i, each joined to it by W_i, n_{i-1} ranks below one child, and
    Y = `inner` neighbouring ranks over which S is already cut. An inner axis speeds up an outer
    collective only by the children that it spans. An all-reduce takes twice as long. Source:
    scaling book, chapter 12, "Cross-node collectives", with W_i for all links of one child.

    Args:
        levels: lowest first; the bandwidth of a level is that of one child, all its links.
        inner: Y, ranks of an inner axis over which the array is sharded already.

    Returns:
        S / T; infinite for a group of one.

    Example:
        Nodes of 8 at 450 GB/s each, 32 nodes at 400 GB/s each: the nodes' links rule.

        >>> f"{gather_bandwidth((Level(8, 450e9), Level(32, 400e9))):.3g}"
        '4.13e+11'
    """
    slowest, below = 0.0, 1
    for level in levels:
        share = max(inner / below, 1.0)
        slowest = max(slowest, (level.degree - 1) / (level.degree * level.bandwidth * share))
        below *= level.degree
    return 1.0 / slowest if slowest else float("inf")


def _known(name: str, p: Column) -> None:
    if name not in NAMES:
        raise UsageError(f"unknown collective {name!r}; it can be {', '.join(NAMES)}")
    if np.any(np.asarray(p) < 1):
        raise UsageError(f"a group of {p} ranks; it needs at least 1")
