"""What each rank holds, unit by unit: the sizes from which every message and byte count follows.

A unit is what data-parallel ranks gather and reduce together: a block, a table, a final norm.
"""

from collections.abc import Iterator
from typing import NamedTuple

from phalanx.core.errors import UsageError
from phalanx.core.layout import Coordinates, Layout, share
from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.schedules.layouts import layers_of_stages, placement

_BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4)}


class UnitSize(NamedTuple):
    """One unit on one rank.

    Attributes:
        name: as the trainer calls it.
        params: elements that this rank holds of it, before padding.
        partial: elements held whole whose gradient on one tensor-parallel rank is a part of
            the sum, because the rank applies them to a part of the sequence, or of the heads.
        shared: elements of key and value heads that several tensor-parallel ranks hold, because
            there are more ranks than heads; they add up the gradient.
        uses: how often a forward pass gathers it.
        backward: how often a backward pass gathers it.
        tied: it lives on both ends of the pipeline, which are on different ranks.
        spread: it is of experts: only ranks with the same place along ep hold the same of it.
    """

    name: str
    params: int
    partial: int
    uses: int = 1
    backward: int = 1
    tied: bool = False
    spread: bool = False
    shared: int = 0

    def padded(self, parts: int) -> int:
        """Elements with the padding that makes them divide over `parts` ranks."""
        return -(-self.params // parts) * parts


def kept_elements(unit: UnitSize, layout: Layout) -> int:
    """Elements of a unit whose reduced gradient one rank keeps, with padding."""
    ep = layout.ep if unit.spread else 1
    if not layout.zero_stage:
        return unit.padded(layout.dp * layout.cp // ep)
    return unit.padded(layout.sharers // ep) // (layout.sharers // ep)


def bytes_per_element(layout: Layout) -> tuple[int, int]:
    """Bytes of an element of activations, and where gradients are accumulated and reduced.

    Raises:
        UsageError: the precision is "auto", which only a device can resolve.
    """
    rest = layout.precision.rest
    if rest not in _BYTES:
        raise UsageError(f"name the precision to count bytes: {', '.join(sorted(_BYTES))}")
    return _BYTES[rest]


def stages_at(run: Run, at: Coordinates) -> Iterator[tuple[int, range]]:
    """The stages that a rank holds, by their place in the schedule, each with its layers."""
    layers = layers_of_stages(run.layout, run.model.layers)
    where = placement(run.layout)
    for stage in where.stages_of(at.pp):
        place = stage % where.depth
        first = sum(layers[:place])
        yield stage, range(first, first + layers[place])


def passes(run: Run) -> int:
    """Micro-batches that go through one stage in a step: m, or its share of them in each copy."""
    return run.micro_batches // placement(run.layout).copies


def units_at(run: Run, at: Coordinates) -> list[UnitSize]:
    """The units that the rank at `at` holds, those of one stage together."""
    return [unit for _, layers in stages_at(run, at) for unit in _units_of_stage(run, at, layers)]


def _units_of_stage(run: Run, at: Coordinates, layers: range) -> Iterator[UnitSize]:
    shape, layout = run.model, run.layout
    first, last = layers.start == 0, layers.stop == shape.layers
    together = placement(layout).ends_together
    apart = shape.tied and not together
    table = share(shape.vocab, layout.tp, at.tp)[1] * shape.hidden
    if first:
        uses = 2 if shape.tied and together else 1
        backward = 0 if layout.logits else uses - 1
        yield UnitSize("embedding", table, 0, uses, backward, tied=apart)
    if first and shape.positions == "learned":
        size = shape.max_positions * shape.hidden
        yield UnitSize("positions", size, size if layout.sequence_parallel else 0, 1, 0)
    for layer in layers:
        for unit in _units_of_block(shape, layout, at.tp, layer):
            yield unit._replace(backward=_backward_gathers(layout, layers, layer))
    if last:
        norm = shape.norm_params()
        yield UnitSize("norm", norm, norm if layout.sequence_parallel else 0)
    if last and (apart or not shape.tied):
        name = "embedding" if shape.tied else "head"
        yield UnitSize(name, table, 0, backward=0 if layout.logits else 1, tied=apart)


def segment_ends(layout: Layout, layers: range) -> list[int]:
    """The last block of each segment of a stage that is recomputed together."""
    return [
        min(i + layout.recompute.segment, layers.stop) - 1
        for i in layers[:: layout.recompute.segment]
    ]


def _backward_gathers(layout: Layout, layers: range, layer: int) -> int:
    """How often backward gathers a block: twice before the last two of a recomputed segment."""
    if not layout.recompute.segment:
        return 1
    ends = segment_ends(layout, layers)
    return 1 if layer in ends or layer + 1 in ends else 2


def _units_of_block(shape: ModelShape, layout: Layout, tp: int, layer: int) -> Iterator[UnitSize]:
    """A block's matrices are cut over tp; norms, and biases added after a sum, are not.

    Under sp each rank applies these to its part of the sequence; norms of heads, with or without,
    to its own heads. A router is whole, and learns through the weights of parts of experts.
    """
    attention = _latent_attention if shape.is_mla else _attention
    routed = shape.routes(layer)
    width = shape.shared_experts * shape.expert_width if routed else shape.ffn
    parts = [attention(shape, layout.tp), _mlp(shape, share(width, layout.tp, tp)[1])]
    parts += [_Part(0, heads=shape.experts * shape.hidden)] if routed else []
    cut = sum(part.cut for part in parts)
    whole = 2 * shape.norm_params() + sum(part.whole for part in parts)
    heads = sum(part.heads for part in parts)
    partial = heads + (whole if layout.sequence_parallel else 0)
    shared = sum(part.shared for part in parts)
    yield UnitSize(f"blocks.{layer}", cut + whole + heads, partial, shared=shared)
    if routed:
        expert = _mlp(shape, share(shape.expert_width, layout.tp, tp)[1]).cut
        yield UnitSize(
            f"blocks.{layer}.experts", shape.experts // layout.ep * expert, 0, spread=True
        )


class _Part(NamedTuple):
    """Elements of a part of a block on one rank.

    Attributes:
        cut: of what tp cuts.
        whole: of what every rank holds, and under sp applies to its part of the sequence.
        heads: of what every rank holds and applies to its own heads; and of a router, which
            learns through each rank's own part of the experts.
        shared: of `cut`, what several ranks hold, because it cannot be cut so often.
    """

    cut: int
    whole: int = 0
    heads: int = 0
    shared: int = 0


def _attention(shape: ModelShape, tp: int) -> _Part:
    h, d = shape.hidden, shape.head_dim
    query, key_value = shape.heads // tp * d, 2 * shape.kv_heads_of_rank(tp) * d
    each = h + shape.has_qkv_bias
    return _Part(
        cut=each * (query + key_value) + h * query,
        whole=h if shape.bias else 0,
        heads=2 * d if shape.qk_norm else 0,
        shared=each * key_value if tp > shape.kv_heads else 0,
    )


def _latent_attention(shape: ModelShape, tp: int) -> _Part:
    """What compresses is whole on every rank; what expands is cut by heads."""
    h, a, r_q, r_kv = shape.hidden, shape.heads // tp, shape.q_lora_rank, shape.kv_lora_rank
    expand = (r_q or h) * shape.qk_width + r_kv * (shape.qk_nope + shape.v_head)
    whole = (h * r_q + r_q) + (h * r_kv + r_kv) + h * shape.qk_rope
    return _Part(a * (expand + shape.v_head * h), whole)


def _mlp(shape: ModelShape, f: int) -> _Part:
    columns = 2 * f if shape.activation == "swiglu" else f
    cut = shape.hidden * (columns + f) + (columns if shape.bias else 0)
    return _Part(cut, shape.hidden if shape.bias else 0)


def tokens_at(run: Run) -> int:
    """Tokens of one micro-batch on one cp rank, padding included."""
    layout = run.layout
    return layout.padded_seq(run.recipe.seq) // layout.cp * layout.mb
