"""Which kernels a rank runs for one micro-batch: of a block, of the embedding, of the head.

Each operator of `core/operators/` becomes kernels of this rank's size, by its share of tokens and
of channels.

Symbols: T tokens of the micro-batch on one rank, s sequence length, E experts, K experts per token,
t tp.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

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
from phalanx.cost.block_memory import widths
from phalanx.cost.compute import MemoryBoundKernel, Product, Scores, Work
from phalanx.cost.framework import Framework
from phalanx.cost.params import expert_tp
from phalanx.cost.table import Column, Table

HALF = 2  # bytes of an activation
# Bytes that making an operand of few bits moves for each of its elements, and in how many kernels:
# it is read in 16 bits, and written along rows and along columns, since backward multiplies it the
# other way round. Where the scale is that of the values at hand they are read once more before.
# Source: NVIDIA, Transformer Engine user guide, "Low precision training".
CASTS = {
    "fp8": (2 + 2 * 1.0, 1),
    "fp8-current": (2 + 2 + 2 * 1.0, 2),
    "fp8-block": (2 + 2 * 1.0, 1),
    "mxfp8": (2 + 2 * (1 + 1 / 32), 1),
    "nvfp4": (2 + 2 + 2 * (0.5 + 1 / 16), 2),
}


@dataclass(frozen=True)
class Slice:
    """What one rank works on in one micro-batch.

    Attributes:
        table: layouts by column.
        framework: how the program does it.
        in_block: it is in a block, which compile=on compiles.
        scope: the part of a block that it is in, of those that graphs may hold; "" is none.
    """

    table: Table
    framework: Framework
    in_block: bool = False
    scope: str = ""

    @property
    def launched(self) -> bool:
        """Whether the host starts each kernel, and no recorded graph."""
        return self.scope not in self.framework.captured

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.table.model

    @cached_property
    def tokens(self) -> Column:
        """T: tokens that the products of this rank see."""
        return self.table.mb * self.table.recipe.seq / self.table.cp

    @cached_property
    def own_tokens(self) -> Column:
        """Tokens of the regions between products, which sp cuts."""
        return self.tokens / np.where(self.table.sp, self.table.tp, 1)

    @cached_property
    def expert_tp(self) -> Column:
        """Over how many tp ranks one expert is cut."""
        return expert_tp(self.table)

    def tokens_of(self, kind: Tokens) -> Column:
        """Tokens that an operator sees; experts that are not cut see only the rank's own.

        Args:
            kind: of "routed" those before they are sent to K experts each.
        """
        if kind == "gathered":
            return self.tokens
        if kind == "own":
            return self.own_tokens
        return np.where(self.expert_tp > 1, self.tokens, self.own_tokens)

    def channels(self, widths: tuple[Width, ...], kind: Tokens) -> Column:
        """Channels of tensors of this rank, all together; a mean where tp cannot cut evenly.

        Args:
            widths: of each tensor.
            kind: whose tokens they are: experts' tensors are cut as experts are, others over tp.
        """
        t = self.expert_tp if kind == "routed" else self.table.tp
        return sum(width.share(t) for width in widths)


def block_work(cut: Slice, *, routed: bool) -> tuple[Work, ...]:
    """The kernels of one block for one micro-batch, attention first.

    Args:
        cut: what the rank works on.
        routed: whether the block has experts, or an MLP.
    """
    block, inside = describe(cut.shape).block(routed=routed), replace(cut, in_block=True)
    work = list(kernels(block.attention, replace(inside, scope="attention")))
    for operator in block.mlp:
        scope = _scope(operator) if routed else "mlp"
        work += kernels((operator,), replace(inside, scope=scope))
    return tuple(work)


def _scope(operator: Operator) -> str:
    """Of an operator behind attention in a block with experts; the choice comes with its norm."""
    if operator.name in ("dispatch", "combine"):
        return "dispatch"
    return "experts" if operator.name.startswith("experts") else "router"


def head_work(cut: Slice) -> tuple[Work, ...]:
    """Final norm, projection to the vocabulary, cross-entropy."""
    return kernels(describe(cut.shape).head, cut)


def embedding_work(cut: Slice) -> tuple[Work, ...]:
    """Looking up rows, and adding their gradients up."""
    return kernels(describe(cut.shape).embedding, cut)


def kernels(operators: Operators, cut: Slice) -> tuple[Work, ...]:
    """What operators run on one rank for one micro-batch, in order of their forward.

    Args:
        operators: of a block, or of an end of the model.
        cut: what the rank works on; it turns tokens and channels into sizes of products and bytes.
    """
    return tuple(work for operator in operators for work in _of_operator(operator, cut))


def _of_operator(operator: Operator, cut: Slice) -> Iterator[Work]:
    match operator.computes:
        case MatrixProduct():
            yield _product(operator, operator.computes, cut)
            yield from _casts(operator, operator.computes, cut)
        case AttentionCore():
            yield from _attention(operator.computes, cut)
        case MemoryBound():
            yield from _memory_bound(operator, operator.computes, cut)
        case CrossEntropy():
            logits = cut.channels((operator.computes.vocabulary,), "gathered") * cut.tokens
            forward, backward = (each * logits for each in cut.framework.loss_bytes)
            yield MemoryBoundKernel(operator.name, forward, backward, 4)


def _product(operator: Operator, computes: MatrixProduct, cut: Slice) -> Product:
    """One product; of experts, one for each of equal load in kernels of their own."""
    tokens, routed = computes.tokens, computes.tokens == "routed"
    experts = cut.shape.experts / cut.table.ep if routed else 1.0
    return Product(
        operator.name,
        cut.tokens_of(tokens) * (cut.shape.top_k if routed else 1) / experts,
        cut.channels(computes.out, tokens),
        cut.channels((computes.inner,), tokens),
        experts,
        operator.part,
        kernels=_kernels(experts, cut) if routed else 1.0,
        launched=1.0 * cut.launched,
        last=operator.is_last,
        low_precision=computes.low_precision and cut.in_block,
    )


def _casts(operator: Operator, computes: MatrixProduct, cut: Slice) -> Iterator[MemoryBoundKernel]:
    """Passes that make operands of few bits: of the input in forward, of the gradient in backward.

    Weights are cast once a step, which does not count.
    """
    recipe = cut.table.precision.recipe
    if not (recipe and computes.low_precision and cut.in_block):
        return
    moved, count = CASTS[recipe]
    rows = cut.tokens_of(computes.tokens)
    rows = rows * (cut.shape.top_k if computes.tokens == "routed" else 1)
    inputs = rows * cut.channels((computes.inner,), computes.tokens)
    outputs = rows * cut.channels(computes.out, computes.tokens)
    several: Column = 1
    if computes.tokens == "routed":
        several = cut.shape.experts / cut.table.ep
    yield MemoryBoundKernel(
        f"{operator.name} operands",
        moved * inputs,
        moved * outputs,
        count * several,
        operator.part,
        launched=1.0 * cut.launched,
    )


def _kernels(experts: Column, cut: Slice) -> Column:
    """Of the products of all experts of a rank; some frameworks run two operators for each."""
    return experts if cut.framework.groups_experts else 2 * experts


def _memory_bound(
    operator: Operator, computes: MemoryBound, cut: Slice
) -> Iterator[MemoryBoundKernel]:
    """A mask of dropout takes one byte, half an element.

    A compiler fuses the passes over one tensor into one kernel, which reads and writes it once: an
    assumption, since what it fuses across operators depends on the graph.
    """
    size = cut.channels(computes.widths, computes.tokens) * cut.tokens_of(computes.tokens)
    drops = computes.drops and cut.framework.dropout
    forward = computes.forward + 0.5 * drops
    backward: Column = computes.backward + 2.5 * drops
    compiled = cut.table.compile & cut.in_block
    if not cut.framework.fused_passes:
        backward = backward + np.where(compiled, 0.0, computes.unfused)
    if forward or np.any(backward):
        size = size * computes.element * widths(cut.table.precision)[0] / HALF
        number = computes.kernels
        if cut.framework.fuses_routing and computes.fused_kernels:
            number = computes.fused_kernels
        yield MemoryBoundKernel(
            operator.name,
            forward * size,
            backward * size,
            np.where(compiled, 1, number + drops),
            operator.part,
            operator.is_last,
            cut.launched,
        )


def _attention(core: AttentionCore, cut: Slice) -> Iterator[Work]:
    """Scores and what they select: fused, or with every score in memory."""
    T, s = cut.tokens, cut.table.recipe.seq
    qk, v = core.query, core.value
    a = cut.channels((core.heads,), "gathered")
    if cut.framework.fused_attention:
        flops = 2 * T * (s / 2) * a * (qk + v)
        if not cut.framework.balances_context:
            flops = flops * (2 - 1 / cut.table.cp)
        yield Scores(
            "attention",
            flops,
            first=cut.framework.first_attention,
            width=(qk + v) / 2,
            launched=1.0 * cut.launched,
        )
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
