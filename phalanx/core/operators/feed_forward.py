"""What follows attention: an MLP, or experts in its place.

Symbols: h hidden, f ffn width, E experts, K experts per token.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.core.operator import (
    Boundary,
    MatrixProduct,
    MemoryBound,
    Operator,
    Parameter,
    SavedTensor,
    Width,
    whole,
)
from phalanx.core.operators.common import matrix

if TYPE_CHECKING:  # a shape counts its parameters by these
    from phalanx.core.model import ModelShape

# Operators of Megatron Core's mixture of experts, counted in its router and token dispatcher:
# softmax, top-k, masks, losses; counting, sorting, splitting; and back.
ROUTER_KERNELS, DISPATCH_KERNELS, COMBINE_KERNELS = 20, 25, 15
# The same with its fused router and permutation: an assumption, from their call graphs.
FUSED_ROUTER, FUSED_DISPATCH, FUSED_COMBINE = 4, 6, 4


def mlp(shape: "ModelShape") -> Iterator[Operator]:
    """SwiGLU or GELU between two products (Shazeer 2020, arXiv:2002.05202)."""
    h = whole(shape.hidden)
    freed_by = frozenset({"norms", "operators"} if shape.norms != "after" else ())
    up, activation, down = _feed_forward(shape, "mlp", "mlp", Width(shape.ffn))
    yield replace(
        up,
        saves=(SavedTensor("mlp input", h, "own", "operand", freed_by), *up.saves),
        boundary=Boundary("columns", shape.hidden, True, frozenset({"operators", "mlp"})),
        scaled=(len(up.saves),),
    )
    yield activation
    yield replace(down, boundary=Boundary("rows", shape.hidden))


# The parts under whose recomputation the two inputs of an activation function, and its result, are
# freed: of operators every second product is done again, but for those of experts.
_FREED = {
    "mlp": (
        frozenset({"mlp", "operators"}),
        frozenset({"mlp"}),
        frozenset({"mlp", "activation", "operators"}),
    ),
    "shared experts": (
        frozenset({"mlp"}),
        frozenset({"mlp"}),
        frozenset({"mlp", "activation", "operators"}),
    ),
    "experts": (
        frozenset({"experts"}),
        frozenset({"experts"}),
        frozenset({"mlp", "activation", "operators", "experts"}),
    ),
}


def _feed_forward(
    shape: "ModelShape", name: str, prefix: str, f: Width
) -> tuple[Operator, Operator, Operator]:
    """Into a width, an activation function, and back; as it is where every token visits it."""
    h, gated, bias = whole(shape.hidden), shape.is_gated, shape.bias
    matrices = ("gate", "up") if gated else ("up",)
    first, second, result = _FREED[name]
    saves = [SavedTensor(f"{name}: second before activation", f, freed_by=second)] * gated
    saves.append(SavedTensor(f"{name}: first before activation", f, freed_by=first))
    up = Operator(
        name=f"{name} up",
        computes=MatrixProduct(h, (f,) * len(matrices)),
        part="mlp",
        parameters=sum(
            (
                matrix(f"{prefix}.{n}", h, f, bias=bias, again=second if i else first)
                for i, n in enumerate(matrices)
            ),
            (),
        ),
        saves=tuple(saves),
        scaled=(1,) * len(matrices),
    )
    activation = Operator(
        name=f"{name} activation",
        computes=MemoryBound((f,), len(matrices) + 1, 2 * len(matrices) + 1),
        part="activation",
        saves=(SavedTensor(f"{name}: after activation", f, "gathered", "operand", result),),
    )
    down = Operator(
        name=f"{name} down",
        computes=MatrixProduct(f, (h,)),
        part="mlp",
        is_last=True,
        parameters=matrix(f"{prefix}.down", f, h, bias=bias),
        scaled=(1,),
    )
    return up, activation, down


def experts(shape: "ModelShape") -> Iterator[Operator]:
    """Router, tokens in the order of experts and back, experts of equal load, shared experts.

    A rank sends out its own tokens K times and receives as many. Sources: Jiang et al. 2024
    (arXiv:2401.04088), section 2.1; DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    rows = whole(shape.top_k * shape.hidden)
    gone = frozenset({"experts"})
    yield _router(shape)
    yield Operator(
        name="choice",
        computes=MemoryBound(
            (whole(shape.experts),),
            *(8, 8, ROUTER_KERNELS),
            tokens="own",
            fused_kernels=FUSED_ROUTER,
            element=4,
        ),
    )
    yield Operator(
        name="dispatch",
        computes=MemoryBound((rows,), 3, 3, DISPATCH_KERNELS, "routed", FUSED_DISPATCH),
        saves=(SavedTensor("dispatched tokens", rows, "routed", "operand", gone),),
    )
    width = Width(shape.expert_width)
    for operator in _feed_forward(shape, "experts", "experts", width):
        yield _of_experts(operator, shape)
    yield Operator(
        name="combine",
        computes=MemoryBound((rows,), 3, 3, COMBINE_KERNELS, "routed", FUSED_COMBINE),
        saves=(SavedTensor("expert results", rows, "routed", freed_by=gone),),
        boundary=Boundary("rows", shape.hidden, beside_product=False),
    )
    if shape.shared_experts:
        shared = Width(shape.shared_experts * shape.expert_width)
        yield from _feed_forward(shape, "shared experts", "shared", shared)


def _router(shape: "ModelShape") -> Operator:
    """Scores of all experts; it saves the affinities, the weights, and what these are made of.

    Every tensor-parallel rank routes the whole sequence in our trainer. Others give each its own
    part, and save logits and affinities.
    """
    h, freed_by = whole(shape.hidden), frozenset({"norms", "operators"})
    chosen = shape.top_k + 1 if shape.normalised else 0  # with their sum
    scores = whole(shape.experts + shape.top_k + chosen)
    weight = Parameter("router.weight", (whole(shape.experts), h), "tp")
    return Operator(
        name="router",
        computes=MatrixProduct(h, (whole(shape.experts),), "own", low_precision=False),
        parameters=(weight,),
        saves=(
            SavedTensor("mlp input", h, "routed", "operand", freed_by),
            SavedTensor("router", scores, "routed", "fp32", others=2 * shape.experts),
        ),
        boundary=Boundary("gather", shape.hidden, again=freed_by, beside_product=False),
    )


def _of_experts(operator: Operator, shape: "ModelShape") -> Operator:
    """The same, done by the experts that each token visits, in a format of their own."""
    computes, count = operator.computes, shape.top_k
    if isinstance(computes, MemoryBound):
        widths = tuple(Width(width.pieces, width.each * count) for width in computes.widths)
        computes = computes._replace(widths=widths, tokens="routed")
    elif isinstance(computes, MatrixProduct):
        computes = computes._replace(tokens="routed")
    saves = tuple(
        tensor._replace(width=Width(tensor.width.pieces, count), tokens="routed")
        for tensor in operator.saves
    )
    return replace(
        operator,
        computes=computes,
        part=operator.part if operator.part == "activation" else "experts",
        is_last=False,
        parameters=tuple(
            p._replace(experts=shape.experts, again=frozenset({"experts"}))
            for p in operator.parameters
        ),
        saves=saves,
        scaled=(),
    )
