"""When communication stops hiding behind arithmetic: the floors and limits of every axis.

The model is the scaling book's (chapters 5 and 12): a block is two matrices, h x f and f x h, in
16 bits; a step has T tokens; arithmetic and communication overlap perfectly, so a layer takes the
slower of two clocks. Bandwidth is what the collective sees: on a torus both links of an axis, in
a switched domain one way per accelerator, beyond it what `collectives.gather_bandwidth` says.

Symbols: T tokens per step, h hidden, f ffn width, E experts and k those a token visits (shared ones
counted in both, as the book does), C FLOP/s of one accelerator, ridge C over bandwidth.
"""

from typing import NamedTuple

from phalanx.core.model import ModelShape


class LayerSizes(NamedTuple):
    """The sizes of the two matrices of a layer.

    Attributes:
        h: hidden.
        f: ffn width, of one expert if there are several.
        E: experts; 1 of an MLP.
        k: experts that a token visits.
    """

    h: int
    f: int
    E: int = 1
    k: int = 1

    @property
    def sparsity(self) -> float:
        """E/k: how many times more weights travel than are multiplied with."""
        return self.E / self.k


class SwitchedFabric(NamedTuple):
    """A switched cluster: domains of G accelerators, joined by a network."""

    G: int
    local: float  # bytes/s one way of one accelerator into its domain
    egress: float  # bytes/s one way of a whole domain into the network


def block_of(shape: ModelShape) -> LayerSizes:
    """The two-matrix block of a model, shared experts counted in E and k."""
    if not shape.is_moe:
        return LayerSizes(shape.hidden, shape.ffn)
    width, shared = shape.moe_ffn or shape.ffn, shape.shared_experts
    return LayerSizes(shape.hidden, width, shape.experts + shared, shape.top_k + shared)


def weights_floor(ridge: float, sparsity: float = 1.0, axes: int = 1, p: int = 1) -> float:
    """Tokens per accelerator below which data parallelism (any ZeRO stage) waits for weights.

        T/n > (E/k) ridge / (axes p)

    Weights travel, so tokens hide them. Source: scaling book, chapter 5, "Data Parallelism";
    chapter 12, "MoE models" and example "What does LLaMA-3 do?".

    Args:
        ridge: FLOP per byte, C over the bandwidth of the collective.
        sparsity: E/k, see `LayerSizes`; 1 without experts.
        axes: of a torus over which the data is cut; each adds its bandwidth.
        p: pipeline stages, of which each rank moves the weights of one.

    Example:
        The book's 2,550 for one axis of TPU v5p, 4.59e14 FLOP/s over 1.8e11 bytes/s:

        >>> round(weights_floor(4.59e14 / 1.8e11))
        2550
    """
    return sparsity * ridge / (axes * p)


def tensor_limit(f: float, ridge: float, axes: int = 1) -> float:
    """Largest tp whose activations hide: axes f / ridge, whatever the batch.

    Source: scaling book, chapter 5, "Tensor Parallelism".

    Args:
        f: ffn width.
        ridge: FLOP per byte, C over the bandwidth of the collective.
        axes: of a torus over which tp is cut; each adds its bandwidth.
    """
    return axes * f / ridge


def domain_weights_seconds(size: float, fabric: SwitchedFabric, inner: int = 1) -> float:
    """Time to gather `size` bytes over many domains, cut already over `inner` neighbours.

        max( size / (W_gpu min(Y, G)),  size / W_domain  G / max(G, Y) )

    An inner axis makes an outer collective faster only once it spans more than one domain.
    Source: scaling book, chapter 12, "Reductions when array is sharded over a separate axis".

    Args:
        size: bytes of the whole array.
        fabric: G, W_gpu (`local`) and W_domain (`egress`).
        inner: Y, ranks of the inner axis.
    """
    local = size / (fabric.local * min(inner, fabric.G))
    return max(local, size / fabric.egress * fabric.G / max(fabric.G, inner))


def domain_weights_floor(peak: float, fabric: SwitchedFabric, inner: int = 1) -> float:
    """Tokens per accelerator that hide weights over many domains: C times seconds per byte.

    Args:
        peak: C, FLOP/s of one accelerator.
        fabric: see `domain_weights_seconds`.
        inner: Y, ranks of an inner axis over which the weights are cut already.
    """
    return peak * domain_weights_seconds(1.0, fabric, inner)


def expected_ranks(e: int, k: int) -> float:
    """How many of e ranks a token visits when it picks k at random: e (1 - (1 - 1/e)^k).

    Never more than min(k, e), which the scaling book counts (chapter 12, "Expert Parallelism").

    Args:
        e: ranks, at least 1; a number or a column.
        k: picks, any of which may fall on the same rank.

    Example:
        >>> round(expected_ranks(8, 8), 2)
        5.25
    """
    return e * (1 - (1 - 1 / e) ** k)
