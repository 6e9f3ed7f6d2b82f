"""Operators that every kind of block has: norms, the residual stream, matrices as parameters."""

from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.core.operator import (
    MemoryBound,
    Operator,
    Parameter,
    SavedTensor,
    TpReduce,
    Width,
    whole,
)

if TYPE_CHECKING:  # a shape counts its parameters by these
    from phalanx.core.model import ModelShape


def residual_norm(
    name: str,
    prefix: str,
    shape: "ModelShape",
    *,
    is_input: bool = False,
    shares: bool = False,
) -> Operator:
    """A norm of the residual stream; a layernorm, which also centres, has a shift as well.

    Args:
        name: of the operator.
        prefix: of its parameters: `prefix.weight` and, of a layernorm, `prefix.bias`, each [h].
        shape: the model; its norm and hidden are used.
        is_input: its input is the block's, from which full recomputation starts.
        shares: its input is saved already, by another operator that reads the same.
    """
    kinds = ("weight", "bias") if shape.norm == "layernorm" else ("weight",)
    names = tuple(f"{prefix}.{kind}" for kind in kinds)
    made = norm(name, names, shape.hidden, is_input=is_input)
    return replace(made, saves=made.saves[1:]) if shares else made


def norm(
    name: str,
    parameters: tuple[str, ...],
    width: int,
    *,
    is_input: bool = False,
    freed_by: frozenset[str] = frozenset(),
) -> Operator:
    """Read and write; backward reads the input and the gradient, and writes one.

    It saves its input, and one statistic per token for each of its parameters. Where nothing is
    fused, their gradients read the input and the gradient once more.

    Args:
        name: of the operator; what it saves is called after it.
        parameters: names of its vectors, each [width]: one of an rmsnorm, two of a layernorm.
        width: channels of a token that are normalised together; tp does not cut them.
        is_input: its input is the block's, from which full recomputation starts.
        freed_by: the parts of a block under whose recomputation it saves nothing.
    """
    h, statistics = whole(width), whole(len(parameters))
    return Operator(
        name=name,
        computes=MemoryBound((h,), 2, 3, tokens="own", unfused=2),
        part="norms",
        parameters=tuple(Parameter(each, (h,), "sp") for each in parameters),
        saves=(
            SavedTensor(f"{name} input", h, "own", freed_by=freed_by, is_input=is_input),
            SavedTensor(f"{name} statistics", statistics, "own", "statistics", freed_by),
        ),
    )


def residual(mask: str, shape: "ModelShape", *, is_last: bool = False) -> Operator:
    """Add to the residual stream, and add its two gradients.

    Args:
        mask: name of the dropout mask that it saves, where a program drops anything.
        shape: the model; its hidden is used.
        is_last: it ends its block, so nothing in the block's own backward reads the sum.
    """
    h = whole(shape.hidden)
    return Operator(
        name="residual",
        computes=MemoryBound((h,), 3, 3, tokens="own", drops=True),
        is_last=is_last,
        saves=(SavedTensor(mask, h, "own", "mask"),),
    )


def matrix(
    name: str, inner: Width, out: Width, *, bias: bool = False, again: frozenset[str] = frozenset()
) -> tuple[Parameter, ...]:
    """The weight of a projection, and its bias; one that is added after a sum is not cut.

    Args:
        name: of the projection: `name.weight` is [out, inner], `name.bias` is [out].
        inner: channels of its input.
        out: channels of its output; tp cuts `out` (columns), `inner` (rows), or neither.
        bias: whether it has one.
        again: the parts of a block under whose recomputation tokens are multiplied with it again.

    Returns:
        The weight, or the weight and the bias.
    """
    tp_reduce: TpReduce = "never" if out.cut or inner.cut else "sp"
    weight = Parameter(f"{name}.weight", (out, inner), tp_reduce, again=again)
    shift = Parameter(f"{name}.bias", (out,), "never" if out.cut else "sp")
    return (weight, shift) if bias else (weight,)
