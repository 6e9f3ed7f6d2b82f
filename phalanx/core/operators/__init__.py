"""A model as the list of its operators: each says once what it computes, has, saves and sends.

The list knows no layout. Parameter counts, what a rank holds, saved bytes, kernels, FLOP and
messages are folds over it (in `cost`: `params`, `saved`, `blocks`, `flops`, `messages`); so a new
kind of block is one function here and one module in the trainer. What the trainer declares, saves
and sends is held against this list by the tests in `tests/conformance`.

Symbols: h hidden, a heads, g kv heads, d head size, f ffn width, V vocabulary, E experts, K experts
per token.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from phalanx.core.operator import (
    BlockOperators,
    Boundary,
    CrossEntropy,
    MatrixProduct,
    MemoryBound,
    ModelOperators,
    Operator,
    Operators,
    Parameter,
    SavedTensor,
    Width,
    whole,
)
from phalanx.core.operators.attention import grouped_attention, latent_attention
from phalanx.core.operators.common import residual, residual_norm
from phalanx.core.operators.feed_forward import experts, mlp

if TYPE_CHECKING:  # a shape counts its parameters by these
    from phalanx.core.model import ModelShape


@lru_cache(maxsize=256)
def describe(shape: "ModelShape") -> ModelOperators:
    """The operators of a model of this shape."""
    return ModelOperators(
        embedding=tuple(_embedding(shape)),
        dense=_block(shape, mlp),
        routed=_block(shape, experts) if shape.is_moe else BlockOperators((), ()),
        head=tuple(_head(shape)),
    )


def blocks(shape: "ModelShape") -> tuple[tuple[Operators, int], ...]:
    """The operators of each kind of block, and how many blocks of the kind there are."""
    model, routed = describe(shape), sum(shape.routes(layer) for layer in range(shape.layers))
    return (model.dense.all, shape.layers - routed), (model.routed.all, routed)


def parameters_of(operators: Operators) -> Iterator[Parameter]:
    """All of them, in the order of first use."""
    for operator in operators:
        yield from operator.parameters


def elements(operators: Operators, experts: int | None = None) -> int:
    """How many parameters some operators have.

    Args:
        operators: of a block, or of an end of the model.
        experts: count only so many of each parameter's experts: top K for what one token meets.
            None counts all.
    """
    return sum(parameter.elements(experts) for parameter in parameters_of(operators))


def _block(
    shape: "ModelShape", mlp: Callable[["ModelShape"], Iterator[Operator]]
) -> BlockOperators:
    attention = latent_attention if shape.is_mla else grouped_attention
    before, after = shape.norms != "after", shape.norms != "before"

    def norm(name: str, there: bool, *, is_input: bool = False, shares: bool = False) -> Operators:
        prefix = name.replace(" ", "_")
        one = residual_norm(name, prefix, shape, is_input=is_input, shares=shares)
        return (one,) if there else ()

    return BlockOperators(
        (
            *norm("attention norm", before, is_input=True),
            *attention(shape),
            *norm("attention post norm", after),
            residual("attention output mask", shape),
        ),
        (
            *norm("mlp norm", before, shares=shape.parallel_branches),
            *mlp(shape),
            *norm("mlp post norm", after),
            residual("mlp output mask", shape, is_last=not after),
        ),
    )


def _embedding(shape: "ModelShape") -> Iterator[Operator]:
    """Looking up rows, and adding their gradients up."""
    h, table = whole(shape.hidden), Width(shape.vocab)
    parameters = [Parameter("embedding.weight", (table, h))]
    if shape.positions == "learned":
        parameters.append(Parameter("positions.weight", (whole(shape.max_positions), h), "sp"))
    yield Operator(
        name="embedding",
        computes=MemoryBound((h,), 2, 4, 2),
        parameters=tuple(parameters),
        boundary=Boundary("rows", shape.hidden, beside_product=False),
    )


def _head(shape: "ModelShape") -> Iterator[Operator]:
    """Final norm, projection to the vocabulary, cross-entropy; a tied table is the embedding's."""
    h, table = whole(shape.hidden), Width(shape.vocab)
    yield residual_norm("final norm", "norm", shape, is_input=True)
    yield Operator(
        name="head",
        computes=MatrixProduct(h, (table,), low_precision=False),
        parameters=(Parameter(f"{'embedding' if shape.tied else 'head'}.weight", (table, h)),),
        saves=(SavedTensor("head input", h, "own"),),
        boundary=Boundary("columns", shape.hidden),
    )
    yield Operator(
        name="loss",
        computes=CrossEntropy(table),
        saves=(
            *([SavedTensor("capped logits", table)] if shape.logit_cap else []),
            SavedTensor("logits", table, format="logits"),
            SavedTensor("softmax sums", whole(1), format="statistics"),
        ),
    )
