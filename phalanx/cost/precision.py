"""Number formats of few bits: what they send, what they refuse. Its twin is trainer/precision/.

Sends, for scales that belong to more than one rank's part of a tensor, the largest values found:

    recipe        when                                 over
    fp8           once a step, all of them             tp; dp and cp; twins of DualPipe
    fp8-current   at every product, one number each    tp, cp: where the tensor is cut
    nvfp4         the same                             tp, cp
    fp8-block, mxfp8: nothing, their scales are a rank's own

Inputs of products travel in their few bits; what that comes to is `operand_bytes`.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from phalanx.core.errors import RefusedError
from phalanx.core.layout import Coordinates, Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import STRETCH
from phalanx.core.run import Run
from phalanx.core.traffic import Transfer
from phalanx.cost.saved import Saved
from phalanx.cost.units import bytes_per_element, passes, stages_at
from phalanx.schedules.layouts import placement

_AMAX = 4  # bytes
_KINDS = 3  # of tensors of a projection: input, matrix, gradient of the output
_SCALE_BYTES = {"fp8-block": 4, "mxfp8": 1}


class OperandBytes(NamedTuple):
    """Bytes per token of an input, as a product keeps and gathers it, and of its scales."""

    data: int
    scales: int = 0


def operand_bytes(layout: Layout, width: int) -> OperandBytes:
    """What a projection's input of `width` channels takes per token.

    NVFP4 is emulated: its inputs stay in the format of the rest.
    """
    recipe, element = layout.precision.recipe, bytes_per_element(layout)[0]
    if recipe in ("", "nvfp4"):
        return OperandBytes(width * element)
    if recipe in _SCALE_BYTES:
        return OperandBytes(width, -(-width // STRETCH[recipe]) * _SCALE_BYTES[recipe])
    return OperandBytes(width)


READ_BY_PRODUCTS = (
    "attention input",
    "mlp input",
    "after activation",
    "compressed query",
    "compressed key-value",
    "dispatched tokens",
)


def as_operands(saved: Iterable[Saved], layout: Layout) -> Iterator[Saved]:
    """What a block keeps, once it keeps inputs of products as they multiply.

    The attention result is read by attention too, so it is kept in both formats, unless attention
    is computed again.
    """
    element = bytes_per_element(layout)[0]
    for item in saved:
        operand = sum(operand_bytes(layout, round(item.bytes / element)))
        if item.name == "attention result" and operand != item.bytes:
            yield item._replace(name="softmax times values")
            yield item._replace(bytes=operand)
        elif item.name.endswith(READ_BY_PRODUCTS):
            yield item._replace(bytes=operand)
        else:
            yield item


class Call(NamedTuple):
    """Projections of one input.

    Attributes:
        cut: as `trainer/precision/product.py` says it.
        matrices: how many.
    """

    cut: Literal["out", "in", "whole"]
    matrices: int


def calls(shape: ModelShape, layer: int) -> list[Call]:
    """The projections of a block; routed experts multiply in the format of the rest."""
    if shape.is_mla:
        down = Call("whole", 3 if shape.q_lora_rank else 2)
        attention = [down, Call("out", 1), Call("out", 2), Call("in", 1)]
    else:
        attention = [Call("out", 3), Call("in", 1)]
    gated = shape.activation == "swiglu"
    if not shape.routes(layer):
        return [*attention, Call("out", 1 + gated), Call("in", 1)]
    shared = [Call("out", 1)] * (1 + gated) + [Call("in", 1)]
    return [*attention, *(shared if shape.shared_experts else ())]


def refuse(run: Run) -> None:
    """Raise RefusedError where a scale would belong to parts that a layout cuts otherwise."""
    layout, seq = run.layout, run.recipe.seq
    recipe, rest = layout.precision.recipe, layout.precision.rest
    if run.recipe.master_weights != "fp32" and rest not in ("bf16", "auto"):
        raise RefusedError(
            f"recipe.master_weights={run.recipe.master_weights} keeps weights in bf16 alone, and "
            f"precision={layout.precision} computes with others; use precision=bf16"
        )
    if rest == "fp16" and layout.logits:
        raise RefusedError(
            f"logits={layout.logits} makes the gradient of the head before the loss scale of fp16 "
            "reaches it, and a sum over many tokens may overflow; use logits=0, or precision=bf16"
        )
    if not recipe:
        return
    if layout.compile:
        raise RefusedError(
            f"compile=on fuses no products in few bits; use precision={recipe} with compile=off"
        )
    padded = layout.padded_seq(seq)
    if padded != seq:
        raise RefusedError(
            f"precision={recipe} would scale {padded - seq} tokens of padding too: recipe.seq="
            f"{seq} does not divide over cp={layout.cp} tp={layout.tp}; use recipe.seq={padded}"
            + (", or sp=off" if layout.sequence_parallel and layout.cp == 1 else "")
        )
    _refuse_shared_heads(run, recipe)
    if STRETCH[recipe]:
        _refuse_cut_channels(run, recipe, STRETCH[recipe])
        _refuse_cut_tokens(run, recipe, STRETCH[recipe])


def _refuse_shared_heads(run: Run, recipe: str) -> None:
    """Each rank would round its own part of a gradient, where one device rounds the sum."""
    shape, tp = run.model, run.layout.tp
    if not shape.is_mla and tp > shape.kv_heads:
        raise RefusedError(
            f"precision={recipe} rounds the gradients of keys and values, and tp={tp} ranks share "
            f"{shape.kv_heads} kv heads, each with a part of them; use tp up to {shape.kv_heads}"
        )


def _refuse_cut_channels(run: Run, recipe: str, stretch: int) -> None:
    tp = run.layout.tp
    for what, width in _cut_widths(run.model).items():
        if tp > 1 and width % (tp * stretch):
            raise RefusedError(
                f"precision={recipe} has a scale for each {stretch} values, and tp={tp} cuts "
                f"{width} {what} elsewhere; make it a multiple of {tp * stretch}, or use tp=1, or "
                "precision=fp8"
            )


def _refuse_cut_tokens(run: Run, recipe: str, stretch: int) -> None:
    """The weight gradient is scaled along the tokens that a rank multiplies at once."""
    layout = run.layout
    alone = layout.tp if run.model.is_mla and layout.sequence_parallel else 1
    parts = alone * (2 * layout.cp if layout.cp > 1 else 1)
    tokens = run.recipe.seq * layout.mb
    if parts > 1 and tokens % (parts * stretch):
        raise RefusedError(
            f"precision={recipe} has a scale for each {stretch} tokens, and {tokens} of a "
            f"micro-batch are cut into {parts} parts; make recipe.seq x mb a multiple of "
            f"{parts * stretch}, or use precision=fp8"
        )


def _cut_widths(shape: ModelShape) -> dict[str, int]:
    """What tp divides of the matrices."""
    widths = {"channels of the MLP": shape.ffn}
    if shape.shared_experts:
        widths["channels of the shared experts"] = shape.shared_experts * shape.expert_width
    if shape.is_mla:
        heads = {"queries": shape.qk_width, "keys": shape.qk_nope, "values": shape.v_head}
        return widths | {f"channels of {n}": shape.heads * width for n, width in heads.items()}
    d = shape.head_dim
    return widths | {
        "channels of queries": shape.heads * d,
        "channels of keys": shape.kv_heads * d,
    }


def transfers(run: Run, at: Coordinates) -> Iterator[Transfer]:
    """The largest values that the rank at `at` sends in one step, once calibrated."""
    layout = run.layout
    layers = [i for _, layers in stages_at(run, at) for i in layers]
    made = [call for i in layers for call in calls(run.model, i)]
    match layout.precision.recipe:
        case "fp8":
            size = _AMAX * _KINDS * sum(call.matrices for call in made)
            if layout.tp > 1:
                yield Transfer("tensor", "all_reduce", "amax", size)
            if layout.dp * layout.cp > 1:
                yield Transfer("data", "all_reduce", "amax", size)
            if placement(layout).copies > 1:
                yield Transfer("pipeline", "all_reduce", "amax", size)
        case "fp8-current" | "nvfp4":
            forwards, m = 2 if layout.recompute.segment else 1, passes(run)
            if layout.tp > 1:
                times = sum(_over_tp(call, forwards, sp=layout.sequence_parallel) for call in made)
                yield Transfer("tensor", "all_reduce", "amax", _AMAX, times * m)
            if layout.cp > 1:
                times = sum(forwards + call.matrices for call in made)
                yield Transfer("context", "all_reduce", "amax", _AMAX, times * m)


def _over_tp(call: Call, forwards: int, *, sp: bool) -> int:
    """Messages of current scaling around the products of one input, in both passes."""
    match call.cut:
        case "out":
            return forwards * (call.matrices + sp) + call.matrices
        case "in":
            return forwards * (call.matrices + 1)
        case "whole":
            return (forwards + call.matrices) * sp
