"""When communication stops hiding behind arithmetic: the floors and limits of every axis.

The model is the scaling book's (chapters 5 and 12): a block is two matrices, h x f and f x h, in
16 bits; a step has T tokens; arithmetic and communication overlap perfectly, so a layer takes the
slower of two clocks. Bandwidth is what the collective sees: on a torus both links of an axis, in
a switched domain one way per accelerator, beyond it what `collectives.gather_bandwidth` says.

Symbols: T tokens per step, h hidden, f ffn width, E experts and k those a token visits (shared ones
counted in both, as the book does), C FLOP/s of one accelerator, ridge C over bandwidth.
"""

from math import sqrt
from typing import NamedTuple

from phalanx.core.errors import UsageError
from phalanx.core.model import ModelShape


class Block(NamedTuple):
    """The sizes of the two matrices of a layer."""

    h: int
    f: int
    E: int = 1
    k: int = 1

    @property
    def sparsity(self) -> float:
        """E/k: how many times more weights travel than are multiplied with."""
        return self.E / self.k


class Clocks(NamedTuple):
    """Seconds of one layer by arithmetic and by communication; the slower one rules."""

    compute: float
    network: float

    @property
    def seconds(self) -> float:
        """How long the layer takes with perfect overlap."""
        return max(self.compute, self.network)

    @property
    def ratio(self) -> float:
        """Arithmetic over communication; above 1 the communication is hidden."""
        return self.compute / self.network if self.network else float("inf")


class Axes(NamedTuple):
    """Torus axes that dp and tp spread over: M_dp and M_tp."""

    dp: int = 2
    tp: int = 1


TWO_AND_ONE = Axes()


class Fabric(NamedTuple):
    """A switched cluster: domains of G accelerators, joined by a network."""

    G: int
    local: float  # bytes/s one way of one accelerator into its domain
    egress: float  # bytes/s one way of a whole domain into the network


def block_of(shape: ModelShape) -> Block:
    """The two-matrix block of a model, shared experts counted in E and k."""
    if not shape.is_moe:
        return Block(shape.hidden, shape.ffn)
    width, shared = shape.moe_ffn or shape.ffn, shape.shared_experts
    return Block(shape.hidden, width, shape.experts + shared, shape.top_k + shared)


def stack_params(block: Block, layers: int) -> int:
    """Weights that the model of this page moves: 2 h E f L."""
    return 2 * block.h * block.E * block.f * layers


def estimated_params(block: Block, layers: int) -> float:
    """Weights with gate and attention, 3 h E f L + 2.5 h^2 L; `ModelShape.params` is exact."""
    return 3 * block.h * block.E * block.f * layers + 2.5 * block.h**2 * layers


def weights_floor(ridge: float, sparsity: float = 1.0, axes: int = 1, p: int = 1) -> float:
    """Tokens per accelerator below which data parallelism (any ZeRO stage) waits for weights.

        T/n > (E/k) ridge / (axes p)

    Weights travel, so tokens hide them. On a torus every further axis adds its bandwidth; with p
    pipeline stages each rank moves 1/p of the weights. Source: scaling book, chapter 5, "Data
    Parallelism"; chapter 12, "MoE models" and example "What does LLaMA-3 do?".
    """
    return sparsity * ridge / (axes * p)


def tensor_limit(f: float, ridge: float, axes: int = 1) -> float:
    """Largest tp whose activations hide: axes f / ridge, whatever the batch.

    Source: scaling book, chapter 5, "Tensor Parallelism".
    """
    return axes * f / ridge


def tensor_width(ridge: float, t: int, G: int = 0) -> float:
    """Smallest k f that hides tp = t: ridge t; over two or more domains of G, ridge (t - G).

    The ring factor: of X = t/G domains, (X - 1)/X of the bytes leave one. Source: scaling book,
    chapter 12, "Tensor Parallelism".
    """
    return ridge * (t - G if t > G else t)


def mixed_best_dp(T: float, f: float, n: int, axes: Axes = TWO_AND_ONE) -> float:
    """The dp that communicates least when n chips of a torus mix FSDP and tp.

        sqrt(T/f M_dp/M_tp n)

    Source: scaling book, chapter 5, "Combining FSDP and Tensor Parallelism".
    """
    return sqrt(T / f * axes.dp / axes.tp * n)


def mixed_floor(f: float, ridge: float, axes: Axes = TWO_AND_ONE, *, overlap: bool = True) -> float:
    """Tokens per chip below which even the best mix of FSDP and tp waits.

        ridge^2 / (M_dp M_tp f)      the two kinds of messages use different axes at once
        4 ridge^2 / (M_dp M_tp f)    one after the other

    Source: scaling book, chapter 5; the current edition overlaps, the edition of February 2025
    did not.
    """
    return (1 if overlap else 4) * ridge**2 / (axes.dp * axes.tp * f)


def mixed_ratio(T: float, f: float, n: int, ridge: float, axes: Axes = TWO_AND_ONE) -> float:
    """Arithmetic over communication at the best mix: sqrt(T f M_dp M_tp / n) / ridge."""
    return sqrt(T * f * axes.dp * axes.tp / n) / ridge


def data_clocks(block: Block, T: float, n: int, peak: float, bandwidth: float) -> Clocks:
    """Backward of one layer under data parallelism over n ranks: 8 T h k f / (n C), 8 h E f / W.

    ZeRO sharding has the same ratio in forward and in backward.
    """
    return Clocks(
        8 * T * block.h * block.k * block.f / (n * peak),
        8 * block.h * block.E * block.f / bandwidth,
    )


def tensor_clocks(block: Block, T: float, t: int, peak: float, bandwidth: float) -> Clocks:
    """Forward of one layer under tp = t: 4 T h k f / (t C), and 4 T h / W to gather and scatter."""
    return Clocks(4 * T * block.h * block.k * block.f / (t * peak), 4 * T * block.h / bandwidth)


def mixed_clocks(
    block: Block, T: float, mesh: tuple[int, int], axes: Axes, peak: float, bandwidth: float
) -> Clocks:
    """Forward of one layer on a torus of dp x tp chips, both kinds of messages at once.

    4 h E f / (tp W M_dp)   weights        4 T h / (dp W M_tp)   activations
    """
    dp, tp = mesh
    weights = 4 * block.h * block.E * block.f / (tp * bandwidth * axes.dp)
    activations = 4 * T * block.h / (dp * bandwidth * axes.tp)
    compute = 4 * T * block.h * block.k * block.f / (dp * tp * peak)
    return Clocks(compute, max(weights, activations))


def domain_weights_seconds(size: float, fabric: Fabric, inner: int = 1) -> float:
    """Time to gather `size` bytes over many domains, cut already over `inner` neighbours.

        max( size / (W_gpu min(Y, G)),  size / W_domain  G / max(G, Y) )

    An inner axis makes an outer collective faster only once it spans more than one domain.
    Source: scaling book, chapter 12, "Reductions when array is sharded over a separate axis".
    """
    local = size / (fabric.local * min(inner, fabric.G))
    return max(local, size / fabric.egress * fabric.G / max(fabric.G, inner))


def domain_weights_floor(peak: float, fabric: Fabric, inner: int = 1) -> float:
    """Tokens per accelerator that hide weights over many domains: C times seconds per byte."""
    return peak * domain_weights_seconds(1.0, fabric, inner)


def expert_clocks(block: Block, T: float, e: int, peak: float, fabric: Fabric) -> Clocks:
    """Forward of one layer under ep = e: 4 T h k f / (e C), and two all-to-alls.

        in a domain    4 T h (e-1)/(e W_gpu) min(k/e, 1)
        beyond it      4 T h (e-G)/(e W_domain) min(G k/e, 1), or the above if slower

    A token goes to at most k of e ranks, and a domain receives it once. k counts routed choices
    here: give a block without shared experts. Source: scaling book, chapter 12, "Expert
    Parallelism" and "AllToAlls".
    """
    moved = 4 * T * block.h
    local = moved * (e - 1) / (e * fabric.local) * min(block.k / e, 1)
    outer = moved * max(e - fabric.G, 0) / (e * fabric.egress) * min(fabric.G * block.k / e, 1)
    return Clocks(4 * T * block.h * block.k * block.f / (e * peak), max(local, outer))


def expert_width(ridge: float, e: int, G: int, k: int) -> float:
    """Smallest f that hides ep = e over more than one domain: ridge (e - G) min(G/e, 1/k).

    Small e: ridge (e - G)/k. Large e: near G ridge, however large e is.

    Raises:
        UsageError: e stays inside one domain.
    """
    if e <= G:
        raise UsageError(f"ep={e} stays inside one domain of {G}; use expert_clocks")
    return ridge * (e - G) * min(G / e, 1 / k)


def expected_ranks(e: int, k: int) -> float:
    """How many of e ranks a token visits when it picks k at random: e (1 - (1 - 1/e)^k).

    `expert_clocks` takes min(k, e), which is never less.
    """
    return e * (1 - (1 - 1 / e) ** k)


class Hops(NamedTuple):
    """What a pipeline passes on: how often on the critical path, and seconds each."""

    number: int
    each: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.number * self.each


def pipeline_hops(h: int, T: float, p: int, m: int, bandwidth: float) -> Hops:
    """Forward messages of a pipeline: m + p - 2 hops of 2 T h / (m W) seconds.

    Source: scaling book, chapter 12, "Pipeline Parallelism".
    """
    return Hops(max(m + p - 2, 0) if p > 1 else 0, 2 * T * h / (m * bandwidth))
