"""The two clocks of a layer: how long arithmetic and how long messages take, scheme by scheme.

The model is the scaling book's (chapters 5 and 12): a layer is two matrices, h x f and f x h, in
16 bits, and takes the slower of the two clocks. Only + - x / and square roots, so that any Python
gives the same bits.

Symbols: T tokens per step, h hidden, f ffn width, E experts and k those a token visits, C FLOP/s
of one accelerator, ridge C over bandwidth.
"""

from math import sqrt
from typing import NamedTuple

from phalanx.core.errors import UsageError
from phalanx.core.model import ModelShape
from phalanx.cost.flops import rate_from_share
from phalanx.cost.roofline import LayerSizes, SwitchedFabric, domain_weights_seconds


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


def stack_params(block: LayerSizes, layers: int) -> int:
    """Weights that the model of this page moves: 2 h E f L.

    Args:
        block: sizes of the layer.
        layers: L.
    """
    return 2 * block.h * block.E * block.f * layers


def estimated_params(block: LayerSizes, layers: int) -> float:
    """Weights with gate and attention, 3 h E f L + 2.5 h^2 L; `ModelShape.params` is exact.

    Args:
        block: sizes of the layer.
        layers: L.
    """
    return 3 * block.h * block.E * block.f * layers + 2.5 * block.h * block.h * layers


def tensor_width(ridge: float, t: int, G: int = 0) -> float:
    """Smallest k f that hides tp = t: ridge t; over two or more domains of G, ridge (t - G).

    The ring factor: of X = t/G domains, (X - 1)/X of the bytes leave one. Source: scaling book,
    chapter 12, "Tensor Parallelism".

    Args:
        ridge: FLOP/s over bytes/s.
        t: tp.
        G: ranks of a domain; 0 where there is none.
    """
    return ridge * (t - G if t > G else t)


def mixed_best_dp(T: float, f: float, n: int, axes: Axes = TWO_AND_ONE) -> float:
    """The dp that communicates least when n chips of a torus mix FSDP and tp.

        sqrt(T/f M_dp/M_tp n)

    Source: scaling book, chapter 5, "Combining FSDP and Tensor Parallelism".

    Args:
        T: tokens per step.
        f: ffn width.
        n: ranks.
        axes: torus axes of dp and of tp.
    """
    return sqrt(T / f * axes.dp / axes.tp * n)


def mixed_floor(f: float, ridge: float, axes: Axes = TWO_AND_ONE, *, overlap: bool = True) -> float:
    """Tokens per chip below which even the best mix of FSDP and tp waits.

        ridge^2 / (M_dp M_tp f)      the two kinds of messages use different axes at once
        4 ridge^2 / (M_dp M_tp f)    one after the other

    Source: scaling book, chapter 5; the current edition overlaps, the edition of February 2025
    did not.

    Args:
        f: ffn width.
        ridge: FLOP/s over bytes/s.
        axes: torus axes of dp and of tp.
        overlap: whether both kinds of messages travel at once.
    """
    return (1 if overlap else 4) * ridge * ridge / (axes.dp * axes.tp * f)


def mixed_ratio(T: float, f: float, n: int, ridge: float, axes: Axes = TWO_AND_ONE) -> float:
    """Arithmetic over communication at the best mix: sqrt(T f M_dp M_tp / n) / ridge.

    Args:
        T: tokens per step.
        f: ffn width.
        n: ranks.
        ridge: FLOP/s over bytes/s.
        axes: torus axes of dp and of tp.
    """
    return sqrt(T * f * axes.dp * axes.tp / n) / ridge


def data_clocks(block: LayerSizes, T: float, n: int, peak: float, bandwidth: float) -> Clocks:
    """Backward of one layer under data parallelism over n ranks: 8 T h k f / (n C), 8 h E f / W.

    ZeRO sharding has the same ratio in forward and in backward.

    Args:
        block: sizes of the layer.
        T: tokens per step.
        n: ranks.
        peak: C, FLOP/s of one rank.
        bandwidth: bytes/s of the collective.
    """
    return Clocks(
        8 * T * block.h * block.k * block.f / (n * peak),
        8 * block.h * block.E * block.f / bandwidth,
    )


def tensor_clocks(block: LayerSizes, T: float, t: int, peak: float, bandwidth: float) -> Clocks:
    """Forward of one layer under tp = t: 4 T h k f / (t C), and 4 T h / W to gather and scatter.

    Args:
        block: sizes of the layer.
        T: tokens per step.
        t: tp.
        peak: C, FLOP/s of one rank.
        bandwidth: bytes/s of the collective.
    """
    return Clocks(4 * T * block.h * block.k * block.f / (t * peak), 4 * T * block.h / bandwidth)


def mixed_clocks(
    block: LayerSizes, T: float, mesh: tuple[int, int], axes: Axes, peak: float, bandwidth: float
) -> Clocks:
    """Forward of one layer on a torus of dp x tp chips, both kinds of messages at once.

    4 h E f / (tp W M_dp)   weights        4 T h / (dp W M_tp)   activations

    Args:
        block: sizes of the layer.
        T: tokens per step.
        mesh: dp and tp.
        axes: torus axes of dp and of tp.
        peak: C, FLOP/s of one rank.
        bandwidth: bytes/s of the collective.
    """
    dp, tp = mesh
    weights = 4 * block.h * block.E * block.f / (tp * bandwidth * axes.dp)
    activations = 4 * T * block.h / (dp * bandwidth * axes.tp)
    compute = 4 * T * block.h * block.k * block.f / (dp * tp * peak)
    return Clocks(compute, max(weights, activations))


def expert_clocks(
    block: LayerSizes, T: float, e: int, peak: float, fabric: SwitchedFabric
) -> Clocks:
    """Forward of one layer under ep = e: 4 T h k f / (e C), and two all-to-alls.

        in a domain    4 T h (e-1)/(e W_gpu) min(k/e, 1)
        beyond it      4 T h (e-G)/(e W_domain) min(G k/e, 1), or the above if slower

    A token goes to at most k of e ranks, and a domain receives it once. k counts routed choices
    here: give a block without shared experts. Source: scaling book, chapter 12, "Expert
    Parallelism" and "AllToAlls".

    Args:
        block: sizes of the layer.
        T: tokens per step.
        e: ep.
        peak: C, FLOP/s of one rank.
        fabric: the switched cluster.
    """
    moved = 4 * T * block.h
    local = moved * (e - 1) / (e * fabric.local) * min(block.k / e, 1)
    outer = moved * max(e - fabric.G, 0) / (e * fabric.egress) * min(fabric.G * block.k / e, 1)
    return Clocks(4 * T * block.h * block.k * block.f / (e * peak), max(local, outer))


def expert_width(ridge: float, e: int, G: int, k: int) -> float:
    """Smallest f that hides ep = e over more than one domain: ridge (e - G) min(G/e, 1/k).

    Small e: ridge (e - G)/k. Large e: near G ridge, however large e is.

    Args:
        ridge: FLOP/s over bytes/s.
        e: ep.
        G: ranks of a domain; 0 where there is none.
        k: experts that a token visits.

    Raises:
        UsageError: e stays inside one domain.
    """
    if e <= G:
        raise UsageError(f"ep={e} stays inside one domain of {G}; use expert_clocks")
    return ridge * (e - G) * min(G / e, 1 / k)


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

    Args:
        h: hidden.
        T: tokens per step.
        p: pipeline ranks.
        m: micro-batches.
        bandwidth: bytes/s of the collective.
    """
    return Hops(max(m + p - 2, 0) if p > 1 else 0, 2 * T * h / (m * bandwidth))


def matmul_output_bytes(shape: ModelShape, tokens: float) -> float:
    """Bytes of the outputs of the three MLP matrices of every block: 2 L T (h + 2 f).

    The scaling book's "three checkpoints per layer" (chapter 5, question 2), in 16 bits.

    Args:
        shape: the model.
        tokens: in all.
    """
    return 2.0 * shape.layers * tokens * (shape.hidden + 2 * shape.ffn)


def seconds_for(tokens: float, flops_per_token: float, peak: float, share: float) -> float:
    """How long `tokens` take at a utilization of `share`.

    Args:
        tokens: in all.
        flops_per_token: FLOP of one token.
        peak: C, FLOP/s of one rank.
        share: utilization.
    """
    return tokens / rate_from_share(share, flops_per_token, peak)


def share_from_rate(tokens_per_second: float, flops_per_token: float, peak: float) -> float:
    """Utilization of a measured rate: tokens/s x FLOP per token / peak.

    Args:
        tokens_per_second: measured.
        flops_per_token: FLOP of one token.
        peak: C, FLOP/s of one rank.
    """
    return tokens_per_second * flops_per_token / peak


def switched_clocks(
    block: LayerSizes, T: float, mesh: tuple[int, int], peak: float, fabric: SwitchedFabric
) -> tuple[float, float, float]:
    """Forward of one layer on dp x tp ranks of a switched cluster: compute, weights, activations.

        4 T h k f / (dp tp C)
        4 h E f gathered over dp, by `domain_weights_seconds`; inside one domain 4 h E f / (tp W)
        4 T h / (dp W) inside a domain; beyond it also 4 T h / (dp W_domain) (tp - G)/tp

    The inner tp makes the outer gather faster only once it spans more than one domain. Source:
    scaling book, chapter 12, "Reductions when array is sharded over a separate axis".

    Args:
        block: sizes of the layer.
        T: tokens per step.
        mesh: dp and tp.
        peak: C, FLOP/s of one rank.
        fabric: the switched cluster.

    Returns:
        Seconds of arithmetic, of what FSDP gathers, and of what tp gathers and scatters.
    """
    dp, tp = mesh
    compute = 4 * T * block.h * block.k * block.f / (dp * tp * peak)
    size = 4.0 * block.h * block.E * block.f if dp > 1 else 0.0
    inside = dp * tp <= fabric.G
    weights = size / (fabric.local * tp) if inside else domain_weights_seconds(size, fabric, tp)
    moved = 4.0 * T * block.h / dp if tp > 1 else 0.0
    activations = moved / fabric.local
    if tp > fabric.G:
        activations = max(activations, moved / fabric.egress * (tp - fabric.G) / tp)
    return compute, weights, activations
