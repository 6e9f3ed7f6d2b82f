"""How many parameters one rank holds before ZeRO cuts them, for every kind of model.

`cost/units.py` lists what the trainer's own units hold; for dense models the sums agree. This
page also knows latent attention and experts, and sizes the largest rank where shares are uneven.

Symbols: h hidden, a heads, g kv heads, d head size, f ffn width, V vocabulary, E experts, t tp,
e ep.
"""

from typing import NamedTuple

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.schedules.layouts import layers_of_stages, num_stages, placement


class Held(NamedTuple):
    """Parameters on one rank.

    Attributes:
        shared: held by all data-parallel ranks alike.
        experts: held only by ranks with the same place along ep.
    """

    shared: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.shared + self.experts

    def plus(self, other: "Held") -> "Held":
        """Both together."""
        return Held(self.shared + other.shared, self.experts + other.experts)


def expert_tp(layout: Layout) -> int:
    """Over how many tp ranks one expert is cut: t, or 1 where ep needs the tp ranks itself.

    ep takes ranks from dp x cp; if it does not divide them it also takes those of tp, as
    Megatron-LM does with an expert tensor-parallel size of 1.
    """
    divides = layout.dp * layout.cp % layout.ep == 0
    return np.where(divides, layout.tp, 1)[()]


def block_held(shape: ModelShape, layout: Layout, layer: int) -> Held:
    """Parameters of block `layer` on one rank: matrices cut over t, norms whole."""
    common = _attention(shape, layout.tp) + 2 * shape.norm_params()
    if not shape.is_moe or layer < shape.dense_layers:
        return Held(common + _mlp(shape, shape.ffn, layout.tp))
    width = shape.moe_ffn or shape.ffn
    shared = shape.shared_experts * _mlp(shape, width, layout.tp)
    router = shape.hidden * shape.experts
    mine = -(-shape.experts // layout.ep)
    return Held(common + router + shared, mine * _mlp(shape, width, expert_tp(layout)))


def table_held(shape: ModelShape, layout: Layout) -> int:
    """Parameters of the token table on the rank that has most rows of it."""
    return -(-shape.vocab // layout.tp) * shape.hidden


def embedding_held(shape: ModelShape, layout: Layout) -> Held:
    """Parameters of the token table, cut over t, and of learned positions."""
    positions = shape.max_positions * shape.hidden if shape.positions == "learned" else 0
    return Held(table_held(shape, layout) + positions)


def head_held(shape: ModelShape, layout: Layout) -> Held:
    """Parameters of the final norm and the projection; a tied one is a copy if the ends are apart.

    Where one rank holds both ends, it is the table of tokens itself.
    """
    tied_here = shape.tied and placement(layout).ends_together
    return Held(shape.norm_params() + (0 if tied_here else table_held(shape, layout)))


def stages_of_rank(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank, as its schedule places them."""
    return placement(layout).slices_of(pp_rank)


def rank_held(shape: ModelShape, layout: Layout, pp_rank: int) -> Held:
    """Parameters on a rank of pipeline rank `pp_rank`, all its chunks together."""
    held = Held()
    for stage in stages_of_rank(layout, pp_rank):
        for layer in stage_layers(shape, layout, stage):
            held = held.plus(block_held(shape, layout, layer))
        if stage == 0:
            held = held.plus(embedding_held(shape, layout))
        if stage == num_stages(layout) - 1:
            held = held.plus(head_held(shape, layout))
    return held


def stage_layers(shape: ModelShape, layout: Layout, stage: int) -> range:
    """The blocks of one stage."""
    sizes = layers_of_stages(layout, shape.layers)
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


def copies(layout: Layout) -> Held:
    """Over how many ranks ZeRO spreads the state of shared parameters, and that of experts.

    Shared parameters are alike on all dp x cp ranks of one shard group, experts only on those
    of them that hold the same experts.
    """
    group = layout.shards * layout.cp
    experts = group * layout.tp // (layout.ep * expert_tp(layout))
    return Held(group, np.maximum(experts, 1)[()])


def _attention(shape: ModelShape, t: int) -> int:
    if shape.is_mla:
        return _latent_attention(shape, t)
    h, d = shape.hidden, shape.head_dim
    a, g = -(-shape.heads // t), -(-shape.kv_heads // t)
    biases = shape.has_qkv_bias * (a + 2 * g) * d + shape.bias * h
    return h * d * (2 * a + 2 * g) + biases + (2 * d if shape.qk_norm else 0)


def _latent_attention(shape: ModelShape, t: int) -> int:
    """The products that compress are whole on every rank; those that expand are cut by heads."""
    h, a = shape.hidden, -(-shape.heads // t)
    qk, r_q, r_kv = shape.qk_nope + shape.qk_rope, shape.q_lora_rank, shape.kv_lora_rank
    query = h * r_q + r_q + r_q * a * qk if r_q else h * a * qk
    key_value = h * (r_kv + shape.qk_rope) + r_kv + r_kv * a * (shape.qk_nope + shape.v_head)
    return query + key_value + a * shape.v_head * h


def _mlp(shape: ModelShape, width: int, t: int) -> int:
    f = -(-width // t)
    matrices = 3 if shape.activation == "swiglu" else 2
    biases = (matrices - 1) * f + shape.hidden if shape.bias else 0
    return matrices * shape.hidden * f + biases
