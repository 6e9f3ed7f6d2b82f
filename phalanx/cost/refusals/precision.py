"""What low precision refuses: a scale that would belong to parts that a layout cuts otherwise."""

from collections.abc import Callable, Mapping

import numpy as np

from phalanx.core.model import ModelShape
from phalanx.core.precision import STRETCH
from phalanx.core.run import Run
from phalanx.cost.refusals.rule import Rule, Scope, keys
from phalanx.cost.table import Booleans, Integers, Table


def _low(clashes: Callable[[Table], Booleans]) -> Callable[[Table], Booleans]:
    """Only where products are in low precision."""
    return lambda x: clashes(x) if x.precision.recipe else _nowhere(x)


def _stretched(clashes: Callable[[Table, int], Booleans]) -> Callable[[Table], Booleans]:
    """Only where so many values share a scale."""

    def clash(x: Table) -> Booleans:
        stretch = STRETCH.get(x.precision.recipe, 0)
        return clashes(x, stretch) if stretch else _nowhere(x)

    return clash


def _nowhere(x: Table) -> Booleans:
    nowhere: Booleans = x.tp < 1
    return nowhere


def _narrow_master(x: Table) -> Booleans:
    narrow = x.recipe.master_weights != "fp32" and x.precision.rest not in ("bf16", "auto")
    return (x.tp >= 1) & narrow


def _cut_widths(shape: ModelShape) -> Mapping[str, int]:
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


def _cut_channels(x: Table, stretch: int) -> Booleans:
    cut: Booleans = np.zeros_like(x.tp, dtype=np.bool_)
    for width in _cut_widths(x.model).values():
        cut = cut | (width % (x.tp * stretch) != 0)
    return (x.tp > 1) & cut


def _says_channels(run: Run) -> str:
    recipe, tp = run.layout.precision.recipe, run.layout.tp
    unit = tp * STRETCH[recipe]
    widths = _cut_widths(run.model)
    what, width = next((what, width) for what, width in widths.items() if width % unit)
    return (
        f"precision={recipe} has a scale for each {STRETCH[recipe]} values, and tp={tp} cuts "
        f"{width} {what} elsewhere; make it a multiple of {unit}, or use tp=1, or precision=fp8"
    )


def _token_parts(x: Table) -> Integers:
    """Into how many parts tokens are cut that are multiplied at once in the weight gradient."""
    alone = np.where(x.sp, x.tp, 1) if x.model.is_mla else 1
    result: Integers = alone * np.where(x.cp > 1, 2 * x.cp, 1)
    return result


def _cut_tokens(x: Table, stretch: int) -> Booleans:
    parts = _token_parts(x)
    found: Booleans = (parts > 1) & (x.recipe.seq * x.mb % (parts * stretch) != 0)
    return found


def _says_tokens(run: Run) -> str:
    recipe, tokens = run.layout.precision.recipe, run.recipe.seq * run.layout.mb
    stretch, parts = STRETCH[recipe], int(_token_parts(Table.of_run(run))[0])
    return (
        f"precision={recipe} has a scale for each {stretch} tokens, and {tokens} of a "
        f"micro-batch are cut into {parts} parts; make recipe.seq x mb a multiple of "
        f"{parts * stretch}, or use precision=fp8"
    )


def _says_padding(run: Run) -> str:
    layout, seq = run.layout, run.recipe.seq
    padded = layout.padded_seq(seq)
    return (
        f"precision={layout.precision.recipe} would scale {padded - seq} tokens of padding too: "
        f"recipe.seq={seq} does not divide over cp={layout.cp} tp={layout.tp}; use "
        f"recipe.seq={padded}"
        + (", or sp=off" if layout.sequence_parallel and layout.cp == 1 else "")
    )


RULES = (
    Rule(
        "weights without fp32 masters are in bf16",
        keys("precision"),
        _narrow_master,
        lambda run: (
            f"recipe.master_weights={run.recipe.master_weights} keeps weights in bf16 alone, and "
            f"precision={run.layout.precision} computes with others; use precision=bf16"
        ),
        Scope.OURS,
    ),
    Rule(
        "logits in chunks come before the loss scale of fp16",
        keys("logits precision"),
        lambda x: (x.logits > 0) & (x.precision.rest == "fp16"),
        lambda run: (
            f"logits={run.layout.logits} makes the gradient of the head before the loss scale of "
            "fp16 reaches it, and a sum over many tokens may overflow; use logits=0, or "
            "precision=bf16"
        ),
        Scope.OURS,
    ),
    Rule(
        "compiled blocks have no products in low precision",
        keys("compile precision"),
        _low(lambda x: x.compile),
        lambda run: (
            "compile=on fuses no products in low precision; use "
            f"precision={run.layout.precision.recipe} with compile=off"
        ),
        Scope.OURS,
    ),
    Rule(
        "padding would be scaled in low precision",
        keys("cp tp sp precision"),
        _low(lambda x: x.padded_seq != x.recipe.seq),
        _says_padding,
        Scope.OURS,
    ),
    Rule(
        "ranks that share kv heads round parts of a gradient",
        keys("tp precision"),
        _low(lambda x: (x.tp > x.model.kv_heads) & (not x.model.is_mla)),
        lambda run: (
            f"precision={run.layout.precision.recipe} rounds the gradients of keys and values, and "
            f"tp={run.layout.tp} ranks share {run.model.kv_heads} kv heads, each with a part of "
            f"them; use tp up to {run.model.kv_heads}"
        ),
        Scope.OURS,
    ),
    Rule(
        "tp cuts channels that share a scale",
        keys("tp precision"),
        _stretched(_cut_channels),
        _says_channels,
        Scope.OURS,
    ),
    Rule(
        "cp or sp cuts tokens that share a scale",
        keys("cp tp sp mb precision"),
        _stretched(_cut_tokens),
        _says_tokens,
        Scope.OURS,
    ),
)
