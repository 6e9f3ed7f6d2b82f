"""Bytes that one rank sends on each axis, by the papers' formulas.

`cost/messages` says what our own step sends, message by message; summed, it must agree with these.

Symbols: s sequence length, b sequences per micro-batch, h hidden, g kv heads, d head size,
L layers, t tp, p pp, c cp, K experts per token.
"""

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.collectives import bytes_sent

HALF = 2  # bytes of one 16-bit number


def hidden_bytes(shape: ModelShape, layout: Layout, seq: int) -> int:
    """The tensor that crosses most boundaries, b x s x h in 16 bits; cp keeps 1/c of it."""
    return HALF * layout.mb * seq // layout.cp * shape.hidden


def tensor_layer_bytes(shape: ModelShape, layout: Layout, seq: int) -> float:
    """Sent by one rank for one layer and micro-batch: four all-reduces, 16 b s h (t-1)/t.

    With sequence parallelism each is a reduce-scatter and an all-gather of the same bytes.
    Sources: Shoeybi et al. 2019 (arXiv:1909.08053), figure 4; Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.2.2.
    """
    return 4 * float(bytes_sent("all_reduce", hidden_bytes(shape, layout, seq), layout.tp))


def pipeline_boundary_bytes(shape: ModelShape, layout: Layout, seq: int) -> float:
    """Sent over one stage boundary for one micro-batch and direction: 2 b s h.

    Each tp rank may send its 1/t and the receiver gather it: Narayanan et al. 2021
    (arXiv:2104.04473), section 4.1.
    """
    return float(hidden_bytes(shape, layout, seq)) if layout.pp > 1 else 0.0


def context_layer_bytes(shape: ModelShape, layout: Layout, seq: int) -> float:
    """Sent by one rank for one layer and micro-batch around the ring of keys and values.

        forward     2 g d b s/c (c-1)    numbers in 16 bits
        backward    twice that: keys and values again, and their gradients

    Source: Liu et al. 2023 (arXiv:2310.01889), section 3.
    """
    kv = shape.kv_heads_of_rank(layout.tp) * shape.kv_width
    forward = HALF * kv * layout.mb * seq / layout.cp * (layout.cp - 1)
    return 3 * forward


def expert_layer_bytes(shape: ModelShape, layout: Layout, seq: int) -> float:
    """Sent by one rank for one layer and micro-batch: tokens out and back, forward and backward.

        4 x 2 K b s h (e-1)/e

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2, without its limit on nodes per token.
    """
    tokens = layout.mb * seq / layout.cp / (layout.tp if layout.sequence_parallel else 1)
    dispatched = HALF * shape.top_k * tokens * shape.hidden
    return 4 * float(bytes_sent("all_to_all", dispatched, layout.ep))


def data_step_bytes(params: float, layout: Layout, gradient_bytes: float = 2.0) -> float:
    """Sent by one rank in a step for `params` parameters that it holds before ZeRO cuts them.

        zero 0          2 x gradients (d-1)/d               one all-reduce
        zero 1, 2       (gradients + weights) (d-1)/d       reduce-scatter, all-gather
        zero 3          (gradients + 2 weights) (d-1)/d     weights gathered twice

    Source: Rajbhandari et al. 2019 (arXiv:1910.02054), section 7, with each at its own width.
    """
    d = layout.shards if layout.zero else layout.dp
    gradients, weights = params * gradient_bytes, params * HALF
    if layout.zero == 0:
        return float(bytes_sent("all_reduce", gradients, d))
    gathers = 2 if layout.zero == 3 else 1
    within = bytes_sent("reduce_scatter", gradients, d) + gathers * bytes_sent(
        "all_gather", weights, d
    )
    return float(within + bytes_sent("all_reduce", gradients / d, layout.replicas))
