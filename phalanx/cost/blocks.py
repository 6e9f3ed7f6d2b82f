"""Which kernels a rank runs for one micro-batch: of a block, of the embedding, of the head.

Symbols: T tokens of the micro-batch on one rank, s sequence length, h hidden, a heads, g kv heads,
d head size, f ffn width, V vocabulary, E experts, K experts per token, t tp.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.core.model import ModelShape
from phalanx.cost.compute import MemoryBoundKernel, Product, Scores, Work
from phalanx.cost.framework import Framework
from phalanx.cost.table import Column, Table

HALF = 2  # bytes of an activation
# Operators of Megatron Core's mixture of experts, counted in its router and token dispatcher:
# softmax, top-k, masks, losses; counting, sorting, splitting; and back.
ROUTER_KERNELS, DISPATCH_KERNELS, COMBINE_KERNELS = 20, 25, 15


@dataclass(frozen=True)
class Slice:
    """What one rank works on in one micro-batch.

    Attributes:
        table: layouts by column.
        framework: how the program does it.
    """

    table: Table
    framework: Framework

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.table.model

    @property
    def seq(self) -> int:
        """S."""
        return self.table.recipe.seq

    @property
    def tokens(self) -> Column:
        """T: tokens that the products of this rank see."""
        return self.table.mb * self.seq / self.table.cp

    @property
    def own_tokens(self) -> Column:
        """Tokens of the regions between products, which sp cuts."""
        return self.tokens / np.where(self.table.sp, self.table.tp, 1)

    @property
    def expert_tp(self) -> Column:
        """Over how many tp ranks one expert is cut; see `params.expert_tp`."""
        return np.where(self.table.dp * self.table.cp % self.table.ep == 0, self.table.tp, 1)


def block_work(cut: Slice, *, routed: bool) -> tuple[Work, ...]:
    """The kernels of one block, dense or with experts."""
    shape, h = cut.shape, cut.shape.hidden
    attention = _latent_attention(cut) if shape.is_mla else _attention(cut)
    mlp = _experts(cut) if routed else _mlp(cut, "mlp", shape.ffn)
    sums = 2 if cut.framework.dropout else 1
    return (
        _norm("attention norm", cut, h),
        *attention,
        _residual(cut, sums),
        _norm("mlp norm", cut, h),
        *mlp,
        _residual(cut, sums)._replace(last=True),
    )


def head_work(cut: Slice) -> tuple[Work, ...]:
    """Final norm, projection to the vocabulary, cross-entropy."""
    V = cut.shape.vocab / cut.table.tp
    forward, backward = (each * V * cut.tokens for each in cut.framework.loss_bytes)
    return (
        _norm("final norm", cut, cut.shape.hidden),
        Product("head", cut.tokens, V, cut.shape.hidden),
        MemoryBoundKernel("loss", forward, backward, 4),
    )


def embedding_work(cut: Slice) -> tuple[Work, ...]:
    """Looking up rows, and adding their gradients up."""
    moved = 2 * HALF * cut.shape.hidden * cut.tokens
    return (MemoryBoundKernel("embedding", moved, 2 * moved, 2),)


def _norm(name: str, cut: Slice, width: Column) -> MemoryBoundKernel:
    """Read and write; backward reads the input and the gradient, and writes one.

    Where nothing is fused, the gradients of scale and shift read both once more.
    """
    size = HALF * width * cut.own_tokens
    return MemoryBoundKernel(name, 2 * size, (3 if cut.framework.fused_passes else 5) * size, part="norms")


def _residual(cut: Slice, sums: int) -> MemoryBoundKernel:
    """Add to the residual stream, and add its two gradients; dropout has a mask of one byte."""
    size = HALF * cut.shape.hidden * cut.own_tokens
    if cut.framework.dropout:
        return MemoryBoundKernel("residual", 3.5 * size, 5.5 * size, sums)
    return MemoryBoundKernel("residual", 3 * size, 3 * size, sums)


def _attention(cut: Slice) -> Iterator[Work]:
    shape, t, T = cut.shape, cut.table.tp, cut.tokens
    a, g, d, h = shape.heads / t, np.maximum(shape.kv_heads / t, 1), shape.head_dim, shape.hidden
    yield Product("query, key, value", T, (a + 2 * g) * d, h)
    if not cut.framework.fused_passes:
        yield MemoryBoundKernel("split and join heads", 0.0, 2 * HALF * (a + 2 * g) * d * T)
    if shape.positions == "rope":
        rotated = HALF * (a + g) * d * T
        yield MemoryBoundKernel("rotary positions", 2 * rotated, 2 * rotated, 2)
    if shape.qk_norm:
        normed = HALF * (a + g) * d * T
        yield MemoryBoundKernel("query and key norm", 2 * normed, 3 * normed, 2)
    yield from _core(cut, a, d, d)
    yield Product("attention output", T, h, a * d)


def _latent_attention(cut: Slice) -> Iterator[Work]:
    """DeepSeek-V2 (arXiv:2405.04434), section 2.1; what compresses is whole on every rank."""
    shape, t, T, h = cut.shape, cut.table.tp, cut.tokens, cut.shape.hidden
    a, qk = shape.heads / t, shape.qk_nope + shape.qk_rope
    r_q, r_kv = shape.q_lora_rank, shape.kv_lora_rank
    if r_q:
        yield Product("query down", cut.own_tokens, r_q, h)
        yield _norm("query norm", cut, r_q)
        yield Product("query up", T, a * qk, r_q, part="latent")
    else:
        yield Product("query", T, a * qk, h)
    yield Product("key-value down", cut.own_tokens, r_kv + shape.qk_rope, h)
    yield _norm("key-value norm", cut, r_kv)
    yield Product("key-value up", T, a * (shape.qk_nope + shape.v_head), r_kv, part="latent")
    joined = HALF * a * (2 * qk + shape.v_head) * T
    yield MemoryBoundKernel("join and rotate", 2 * joined, 2 * joined, 12, part="latent")
    yield from _core(cut, a, qk, shape.v_head)
    yield Product("attention output", T, h, a * shape.v_head)


def _core(cut: Slice, a: Column, qk: int, v: int) -> Iterator[Work]:
    """Scores and what they select: fused, or with every score in memory."""
    T, s = cut.tokens, cut.seq
    if cut.framework.fused_attention:
        flops = 2 * T * (s / 2) * a * (qk + v)
        yield Scores("attention", flops, first=cut.framework.first_attention)
        return
    heads, rows = a * cut.table.mb, s / cut.table.cp
    scores = HALF * a * s * T
    yield Product("scores", rows, s, qk, heads, "core", weights=False)
    yield MemoryBoundKernel("softmax", 2 * scores, 3 * scores, 1, "core")
    if cut.framework.dropout:
        yield MemoryBoundKernel("score dropout", 2.5 * scores, 2.5 * scores, 1, "core")
    yield Product("selected values", rows, v, s, heads, "core", weights=False)
    kept = HALF * a * T
    yield MemoryBoundKernel("transpose heads", 2 * v * kept, 2 * (2 * qk + 2 * v) * kept, 4)


def _mlp(cut: Slice, name: str, f: Column) -> Iterator[Work]:
    shape, t, T = cut.shape, cut.table.tp, cut.tokens
    inputs = 2 if shape.activation == "swiglu" else 1
    yield Product(f"{name} up", T, inputs * f / t, shape.hidden, part="mlp")
    yield _activation(f"{name} activation", inputs, f / t * T)
    yield Product(f"{name} down", T, shape.hidden, f / t, part="mlp", last=True)


def _activation(name: str, inputs: int, elements: Column) -> MemoryBoundKernel:
    size = HALF * elements
    return MemoryBoundKernel(name, (inputs + 1) * size, (2 * inputs + 1) * size, part="activation")


def _experts(cut: Slice) -> Iterator[Work]:
    """Router, tokens in the order of experts and back, experts of equal load, shared experts."""
    shape = cut.shape
    f, K, h = shape.moe_ffn or shape.ffn, shape.top_k, shape.hidden
    t = cut.expert_tp
    mine = shape.experts / cut.table.ep
    tokens = np.where(t == 1, cut.own_tokens, cut.tokens)
    each = tokens * K / mine
    inputs = 2 if shape.activation == "swiglu" else 1
    yield Product("router", cut.own_tokens, shape.experts, h)
    chances = 4 * shape.experts * cut.own_tokens
    yield MemoryBoundKernel("choice", 8 * chances, 8 * chances, ROUTER_KERNELS)
    moved = HALF * K * h * tokens
    yield MemoryBoundKernel("dispatch", 3 * moved, 3 * moved, DISPATCH_KERNELS)
    yield Product("experts up", each, inputs * f / t, h, mine, "experts", kernels=2 * mine)
    yield _activation("experts activation", inputs, f / t * tokens * K)
    yield Product("experts down", each, h, f / t, mine, "experts", kernels=2 * mine)
    yield MemoryBoundKernel("combine", 3 * moved, 3 * moved, COMBINE_KERNELS)
    if shape.shared_experts:
        yield from _mlp(cut, "shared experts", shape.shared_experts * f)
