"""Low precision: what operands take in memory and on the way, and what it refuses.

What ranks tell each other about the scales is in `cost/messages/precision.py`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import STRETCH, Precision
from phalanx.core.run import Run
from phalanx.cost.saved import Saved

_BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4)}
_SCALE_BYTES = {"fp8-block": 4, "mxfp8": 1}


class OperandBytes(NamedTuple):
    """Bytes per token of an input, as a product keeps and gathers it, and of its scales."""

    data: int
    scales: int = 0


def element_bytes(precision: Precision) -> tuple[int, int]:
    """Bytes of an element of activations, and where gradients are accumulated and reduced.

    Raises:
        UsageError: the precision is "auto", which only a device can resolve.
    """
    if precision.rest not in _BYTES:
        raise UsageError(f"name the precision to count bytes: {', '.join(sorted(_BYTES))}")
    return _BYTES[precision.rest]


def operand_bytes(precision: Precision, width: int) -> OperandBytes:
    """What a projection's input of `width` channels takes per token.

    NVFP4 is emulated: its inputs stay in the format of the rest.
    """
    recipe, element = precision.recipe, element_bytes(precision)[0]
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
    element = element_bytes(layout.precision)[0]
    for item in saved:
        operand = sum(operand_bytes(layout.precision, round(item.bytes / element)))
        if item.name == "attention result" and operand != item.bytes:
            yield item._replace(name="softmax times values")
            yield item._replace(bytes=operand)
        elif item.name.endswith(READ_BY_PRODUCTS):
            yield item._replace(bytes=operand)
        else:
            yield item


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
