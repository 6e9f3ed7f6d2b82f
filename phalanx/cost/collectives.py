"""What a collective operation sends, and how long it takes in the latency-bandwidth model.

Symbols: p ranks of the group, S bytes of the full vector, α latency of one message, B bandwidth
of one rank, one way.
"""

from math import ceil, log2
from typing import Literal, NamedTuple

from phalanx.core.errors import UsageError

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
Algorithm = Literal["ring", "tree", "double_tree"]

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


class Wire(NamedTuple):
    """What one rank sees of the network."""

    latency: float  # α, seconds
    bandwidth: float  # B, bytes/s one way


class Level(NamedTuple):
    """One level of a tree of switches: how many children, and how fast each is joined.

    A child of the lowest level is a rank, of the next one a domain, and so on.
    """

    degree: int
    bandwidth: float  # bytes/s one way, between one child and this level


def bytes_sent(name: str, S: float, p: int) -> float:
    """Bytes that the busiest rank sends, at the least.

        all_reduce                                     2 S (p-1)/p
        all_gather, reduce_scatter, all_to_all           S (p-1)/p
        scatter (from the root), gather (into it)        S (p-1)/p
        broadcast, reduce (every rank passes it on)      S

    S is the full vector: what is reduced, or the gathered result; for all_to_all, what one rank
    holds. Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters
    of workstations"; Chan et al. 2007, "Collective communication: theory, practice, and
    experience", table 2.

    Raises:
        UsageError: an unknown collective, or no ranks.
    """
    _known(name, p)
    if p == 1:
        return 0.0
    if name in ("broadcast", "reduce"):
        return S
    return (2.0 if name == "all_reduce" else 1.0) * S * (p - 1) / p


def ring_seconds(name: str, S: float, p: int, wire: Wire) -> float:
    """Time around a ring (for all_to_all: in p - 1 exchanges of pairs).

        all_reduce     2 (p-1) α + 2 (p-1)/p S/B
        the others       (p-1) α +   (p-1)/p S/B
        broadcast, reduce (p-1) α +          S/B    pipelined in many pieces

    Optimal in bytes, not in rounds. Source: Patarasuk and Yuan 2009, section 3.
    """
    rounds = (2 if name == "all_reduce" else 1) * (p - 1)
    return rounds * wire.latency + bytes_sent(name, S, p) / wire.bandwidth


def tree_seconds(name: str, S: float, p: int, wire: Wire) -> float:
    """Time over a binomial tree, in ceil(log2 p) rounds: fewer rounds, more bytes.

        broadcast, reduce           r (α + S/B)
        all_reduce                2 r (α + S/B)          reduce, then broadcast
        scatter, gather             r α + (p-1)/p S/B
        all_gather                2 r α + (p-1)/p S/B + r S/B    gather, then broadcast
        reduce_scatter            2 r α + r S/B + (p-1)/p S/B    reduce, then scatter
        all_to_all                  r (α + S/(2B))       Bruck et al. 1997

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH", sections 3 and 4.
    """
    _known(name, p)
    if p == 1:
        return 0.0
    r, alpha, beta = ceil(log2(p)), wire.latency, S / wire.bandwidth
    part = beta * (p - 1) / p
    match name:
        case "broadcast" | "reduce":
            return r * (alpha + beta)
        case "all_reduce":
            return 2 * r * (alpha + beta)
        case "scatter" | "gather":
            return r * alpha + part
        case "all_to_all":
            return r * (alpha + beta / 2)
        case _:
            return 2 * r * alpha + r * beta + part


def double_tree_seconds(name: str, S: float, p: int, wire: Wire) -> float:
    """Time over two complementary trees, each carrying half in many pieces, as NCCL does it.

        all_reduce        2 r α + 2 S/B
        broadcast, reduce   r α +   S/B

    Rounds of a tree at nearly the bytes of a ring. The rest is a plain tree. Source: Sanders,
    Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
    """
    if name not in ("all_reduce", "broadcast", "reduce") or p == 1:
        return tree_seconds(name, S, p, wire)
    passes = 2 if name == "all_reduce" else 1
    return passes * (ceil(log2(p)) * wire.latency + S / wire.bandwidth)


_ALGORITHMS = {"ring": ring_seconds, "tree": tree_seconds, "double_tree": double_tree_seconds}


def best_seconds(name: str, S: float, p: int, wire: Wire) -> tuple[float, Algorithm]:
    """The fastest of the three algorithms, and which it is.

    Small vectors and many ranks go to trees; large vectors to the ring.
    """
    times: list[tuple[float, Algorithm]] = [
        (seconds(name, S, p, wire), algorithm)  # type: ignore[misc]  # keys are the literals
        for algorithm, seconds in _ALGORITHMS.items()
    ]
    return min(times)


def in_network_seconds(S: float, wire: Wire, gain: float = 1.3) -> float:
    """An all-reduce that the switches add up (SHARP): 2 S / (gain B), and two messages.

    In theory every rank sends S once, a gain near 2; measured on H100 nodes it is about 1.3.
    Source: scaling book, chapter 12, "In network reductions".
    """
    return 2 * wire.latency + 2 * S / (gain * wire.bandwidth)


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
    """
    slowest, below = 0.0, 1
    for level in levels:
        share = max(inner / below, 1.0)
        slowest = max(slowest, (level.degree - 1) / (level.degree * level.bandwidth * share))
        below *= level.degree
    return 1.0 / slowest if slowest else float("inf")


def _known(name: str, p: int) -> None:
    if name not in NAMES:
        raise UsageError(f"unknown collective {name!r}; it can be {', '.join(NAMES)}")
    if p < 1:
        raise UsageError(f"a group of {p} ranks; it needs at least 1")
