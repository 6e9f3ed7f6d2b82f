"""Which kernels a rank runs for one micro-batch: of a block, of the embedding, of the head.

Each operator of `core/operators/` becomes kernels of this rank's size, by its share of tokens and
of channels.

Symbols: T tokens of the micro-batch on one rank, s sequence length, E experts, K experts per token,
t tp.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operator import (
    AttentionCore,
    CrossEntropy,
    MatrixProduct,
    MemoryBound,
    Operator,
    Operators,
    Tokens,
    Width,
)
from phalanx.core.operators import describe
from phalanx.cost.compute import Product, Scores, Sweep, Work
from phalanx.cost.params import expert_tp
from phalanx.cost.practice import Practice

HALF = 2  # bytes of an activation


@dataclass(frozen=True)
class Slice:
    """What one rank works on in one micro-batch.

    Attributes:
        shape: the model.
        layout: degrees, mb, sp.
        seq: s.
        practice: how the program does it.
    """

    shape: ModelShape
    layout: Layout
    seq: int
    practice: Practice

    @property
    def tokens(self) -> float:
        """T: tokens that the products of this rank see."""
        return self.layout.mb * self.seq / self.layout.cp

    def tokens_of(self, kind: Tokens) -> float:
        """Tokens that an operator sees; experts that are not cut see only the rank's own."""
        if kind == "gathered" or (kind == "routed" and expert_tp(self.layout) > 1):
            return self.tokens
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    def channels(self, widths: tuple[Width, ...], kind: Tokens) -> float:
        """Channels of tensors of this rank, all together."""
        t = np.asarray(expert_tp(self.layout) if kind == "routed" else self.layout.tp)
        return float(sum(width.share(t) for width in widths))


def block_work(cut: Slice, *, routed: bool) -> tuple[Work, ...]:
    """The kernels of one block, dense or with experts."""
    return kernels(describe(cut.shape).block(routed=routed).all, cut)


def head_work(cut: Slice) -> tuple[Work, ...]:
    """Final norm, projection to the vocabulary, cross-entropy."""
    return kernels(describe(cut.shape).head, cut)


def embedding_work(cut: Slice) -> tuple[Work, ...]:
    """Looking up rows, and adding their gradients up."""
    return kernels(describe(cut.shape).embedding, cut)


def kernels(operators: Operators, cut: Slice) -> tuple[Work, ...]:
    """What operators run on one rank, in order."""
    return tuple(work for operator in operators for work in _of_operator(operator, cut))


def _of_operator(operator: Operator, cut: Slice) -> Iterator[Work]:
    match operator.computes:
        case MatrixProduct():
            yield _product(operator, operator.computes, cut)
        case AttentionCore():
            yield from _attention(operator.computes, cut)
        case MemoryBound():
            yield from _memory_bound(operator, operator.computes, cut)
        case CrossEntropy():
            logits = cut.channels((operator.computes.vocabulary,), "gathered") * cut.tokens
            forward, backward = (each * logits for each in cut.practice.loss_bytes)
            yield Sweep(operator.name, forward, backward, 4)


def _product(operator: Operator, computes: MatrixProduct, cut: Slice) -> Product:
    """One product; of experts, one for each of equal load in kernels of their own."""
    tokens, routed = computes.tokens, computes.tokens == "routed"
    experts = cut.shape.experts / cut.layout.ep if routed else 1.0
    return Product(
        operator.name,
        cut.tokens_of(tokens) * (cut.shape.top_k if routed else 1) / experts,
        cut.channels(computes.out, tokens),
        cut.channels((computes.inner,), tokens),
        experts,
        operator.part,
        kernels=2 * experts if routed else 1.0,
        last=operator.is_last,
    )


def _memory_bound(operator: Operator, computes: MemoryBound, cut: Slice) -> Iterator[Sweep]:
    """A mask of dropout takes one byte, half an element."""
    size = cut.channels(computes.widths, computes.tokens) * cut.tokens_of(computes.tokens)
    drops = computes.drops and cut.practice.dropout
    forward = computes.forward + 0.5 * drops
    backward = computes.backward + 2.5 * drops
    if not cut.practice.fused_passes:
        backward += computes.unfused
    if forward or backward:
        size *= computes.element
        count = computes.kernels + drops
        yield Sweep(
            operator.name, forward * size, backward * size, count, operator.part, operator.is_last
        )


def _attention(core: AttentionCore, cut: Slice) -> Iterator[Work]:
    """Scores and what they select: fused, or with every score in memory."""
    T, s, qk, v = cut.tokens, cut.seq, core.query, core.value
    a = cut.channels((core.heads,), "gathered")
    if cut.practice.fused_attention:
        flops = 2 * T * (s / 2) * a * (qk + v)
        yield Scores("attention", flops, first=cut.practice.first_attention)
        return
    heads, rows = a * cut.layout.mb, s / cut.layout.cp
    scores = HALF * a * s * T
    yield Product("scores", rows, s, qk, heads, "core", weights=False)
    yield Sweep("softmax", 2 * scores, 3 * scores, 1, "core")
    if cut.practice.dropout:
        yield Sweep("score dropout", 2.5 * scores, 2.5 * scores, 1, "core")
    yield Product("selected values", rows, v, s, heads, "core", weights=False)
    kept = HALF * a * T
    yield Sweep("transpose heads", 2 * v * kept, 2 * (2 * qk + 2 * v) * kept, 4)
