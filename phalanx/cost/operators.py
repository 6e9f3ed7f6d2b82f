"""A model as the list of its operators: each says once what it computes, has, saves and sends.

The list knows no layout. Parameter counts, what a rank holds, saved bytes, kernels, FLOP and
messages are folds over it (`params`, `saved`, `blocks`, `flops`, `messages`); so a new kind of
block is one function here and one module in the trainer. What the trainer declares, saves and
sends is held against this list by the tests in `tests/conformance`.

Symbols: h hidden, a heads, g kv heads, d head size, f ffn width, V vocabulary, E experts, K experts
per token.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from phalanx.core.model import ModelShape
from phalanx.cost.operator import (
    AttentionCore,
    BlockOperators,
    Boundary,
    CrossEntropy,
    MatrixProduct,
    MemoryBound,
    ModelOperators,
    Operator,
    Operators,
    Parameter,
    Partial,
    SavedTensor,
    Width,
    whole,
)

# Operators of Megatron Core's mixture of experts, counted in its router and token dispatcher:
# softmax, top-k, masks, losses; counting, sorting, splitting; and back.
ROUTER_KERNELS, DISPATCH_KERNELS, COMBINE_KERNELS = 20, 25, 15
LATENT = frozenset({"latent"})  # what goes where latent attention is computed again


@lru_cache(maxsize=256)
def describe(shape: ModelShape) -> ModelOperators:
    """The operators of a model of this shape."""
    return ModelOperators(
        embedding=tuple(_embedding(shape)),
        dense=_block(shape, _mlp),
        routed=_block(shape, _experts) if shape.is_moe else BlockOperators((), ()),
        head=tuple(_head(shape)),
    )


def blocks(shape: ModelShape) -> tuple[tuple[Operators, int], ...]:
    """The operators of each kind of block, and how many blocks of the kind there are."""
    model, routed = describe(shape), sum(shape.routes(layer) for layer in range(shape.layers))
    return (model.dense.all, shape.layers - routed), (model.routed.all, routed)


def _block(shape: ModelShape, mlp: Callable[[ModelShape], Iterator[Operator]]) -> BlockOperators:
    attention = _latent_attention if shape.is_mla else _attention
    return BlockOperators(
        (
            _residual_norm("attention norm", "attention_norm", shape, is_input=True),
            *attention(shape),
            _residual("attention output mask", shape),
        ),
        (
            _residual_norm("mlp norm", "mlp_norm", shape),
            *mlp(shape),
            _residual("mlp output mask", shape, is_last=True),
        ),
    )


def _residual_norm(
    name: str, prefix: str, shape: ModelShape, *, is_input: bool = False
) -> Operator:
    """A norm of the residual stream; a layernorm, which also centres, has a shift as well."""
    kinds = ("weight", "bias") if shape.norm == "layernorm" else ("weight",)
    names = tuple(f"{prefix}.{kind}" for kind in kinds)
    return _norm(name, names, shape.hidden, is_input=is_input)


def _norm(
    name: str,
    parameters: tuple[str, ...],
    width: int,
    *,
    is_input: bool = False,
    let_go: frozenset[str] = frozenset(),
) -> Operator:
    """Read and write; backward reads the input and the gradient, and writes one.

    It saves its input, and one statistic per token for each of its parameters. Where nothing is
    fused, their gradients read the input and the gradient once more.
    """
    h, statistics = whole(width), whole(len(parameters))
    return Operator(
        name=name,
        computes=MemoryBound((h,), 2, 3, tokens="own", unfused=2),
        part="norms",
        parameters=tuple(Parameter(each, (h,), "sp") for each in parameters),
        saves=(
            SavedTensor(f"{name} input", h, "own", let_go=let_go, is_input=is_input),
            SavedTensor(f"{name} statistics", statistics, "own", "statistics", let_go),
        ),
    )


def _residual(mask: str, shape: ModelShape, *, is_last: bool = False) -> Operator:
    """Add to the residual stream, and add its two gradients."""
    h = whole(shape.hidden)
    return Operator(
        name="residual",
        computes=MemoryBound((h,), 3, 3, tokens="own", drops=True),
        is_last=is_last,
        saves=(SavedTensor(mask, h, "own", "mask"),),
    )


def _matrix(
    name: str, inner: Width, out: Width, *, bias: bool = False, again: frozenset[str] = frozenset()
) -> tuple[Parameter, ...]:
    """The weight of a projection, and its bias; one that is added after a sum is not cut."""
    partial: Partial = "never" if out.cut or inner.cut else "sp"
    weight = Parameter(f"{name}.weight", (out, inner), partial, again=again)
    shift = Parameter(f"{name}.bias", (out,), "never" if out.cut else "sp")
    return (weight, shift) if bias else (weight,)


def _attention(shape: ModelShape) -> Iterator[Operator]:
    """Grouped heads (Ainslie et al. 2023, arXiv:2305.13245)."""
    h, a, g, d = whole(shape.hidden), shape.heads, shape.kv_heads, shape.head_dim
    query, keys, bias = Width(a, d), Width(g, d), shape.has_qkv_bias
    projections = {"q": query, "k": keys, "v": keys}
    again = {"k": frozenset({"operators"})}
    yield Operator(
        name="query, key, value",
        computes=MatrixProduct(h, (query, keys, keys)),
        parameters=sum(
            (
                _matrix(f"attention.{n}", h, out, bias=bias, again=again.get(n, frozenset()))
                for n, out in projections.items()
            ),
            (),
        ),
        saves=(_attention_input(shape),),
        boundary=Boundary("columns", shape.hidden, True, frozenset({"operators"})),
        scaled=(3,),
    )
    every = (query, keys, keys)
    yield Operator(name="split and join heads", computes=MemoryBound(every, 0, 0, unfused=2))
    if shape.positions == "rope":
        yield Operator(
            name="rotary positions",
            computes=MemoryBound((query, keys), 2, 2, 2),
            saves=(SavedTensor("rotary angles", whole(d), format="angles"),),
        )
    if shape.qk_norm:
        yield _head_norms(shape)
    yield _core(shape, (("query", query, ""), ("keys", keys, "operators"), ("values", keys, "")))
    yield _output(shape, Width(a, d))


def _attention_input(shape: ModelShape) -> SavedTensor:
    let_go = frozenset({"norms", "operators"})
    return SavedTensor("attention input", whole(shape.hidden), "own", "operand", let_go)


def _head_norms(shape: ModelShape) -> Operator:
    """A norm of each query and each key head, whose scales all heads share (Qwen3)."""
    d = shape.head_dim
    heads = {"query": shape.heads, "key": shape.kv_heads}
    saves = []
    for name, count in heads.items():
        saves.append(SavedTensor(f"{name} norm input", Width(count, d)))
        saves.append(SavedTensor(f"{name} norm statistics", Width(count), format="statistics"))
    return Operator(
        name="query and key norm",
        computes=MemoryBound(tuple(Width(count, d) for count in heads.values()), 2, 3, 2),
        parameters=tuple(
            Parameter(f"attention.{n}_norm.weight", (whole(d),), "tp") for n in ("q", "k")
        ),
        saves=tuple(saves),
    )


def _core(shape: ModelShape, inputs: tuple[tuple[str, Width, str], ...]) -> Operator:
    """What queries, keys and values go into, each with the part that makes it again, and result."""
    value = shape.kv_width - shape.qk_width
    saves = [
        SavedTensor(name, width, let_go=frozenset({part} - {""})) for name, width, part in inputs
    ]
    # attention reads its result as it is, and the product behind it as it multiplies
    saves.append(SavedTensor("attention result", Width(shape.heads, value), format="both"))
    return Operator(
        name="attention",
        computes=AttentionCore(Width(shape.heads), Width(shape.kv_heads), shape.qk_width, value),
        part="core",
        saves=tuple(saves),
    )


def _output(shape: ModelShape, result: Width) -> Operator:
    h = whole(shape.hidden)
    return Operator(
        name="attention output",
        computes=MatrixProduct(result, (h,)),
        parameters=_matrix("attention.o", result, h, bias=shape.bias and not shape.is_mla),
        boundary=Boundary("rows", shape.hidden),
        scaled=(1,),
    )


def _latent_attention(shape: ModelShape) -> Iterator[Operator]:
    """Queries, keys and values out of short vectors: DeepSeek-V2 (arXiv:2405.04434), section 2.1.

    What compresses is whole on every rank, which does it for its own tokens; what expands is cut
    by heads.
    """
    h, a, r_q, r_kv = whole(shape.hidden), shape.heads, shape.q_lora_rank, shape.kv_lora_rank
    query, rope = Width(a, shape.qk_width), whole(shape.qk_rope)
    key, value = Width(a, shape.qk_nope), Width(a, shape.v_head)
    if r_q:
        yield from _compressed_query(shape, query)
    else:
        yield Operator(
            name="query",
            computes=MatrixProduct(h, (query,)),
            parameters=_matrix("attention.q", h, query),
            saves=(_attention_input(shape),),
            boundary=Boundary("columns", shape.hidden, True),
            scaled=(1,),
        )
    yield Operator(
        name="key-value down",
        computes=MatrixProduct(h, (whole(r_kv + shape.qk_rope),), tokens="own"),
        parameters=(
            *_matrix("attention.kv_down", h, whole(r_kv)),
            *_matrix("attention.k_rope", h, rope),
        ),
        boundary=Boundary("gather", shape.qk_rope, beside_product=False),
        scaled=() if r_q else (2,),
    )
    yield _norm("key-value norm", ("attention.kv_norm.weight",), r_kv, let_go=LATENT)
    latent = whole(r_kv)
    yield Operator(
        name="key-value up",
        computes=MatrixProduct(latent, (key, value)),
        part="latent",
        parameters=(
            *_matrix("attention.k_up", latent, key, again=LATENT),
            *_matrix("attention.v_up", latent, value, again=LATENT),
        ),
        saves=(SavedTensor("compressed key-value", latent, "own", "operand"),),
        boundary=Boundary("columns", r_kv, True),
        scaled=(2,),
    )
    yield Operator(
        name="join and rotate",
        computes=MemoryBound((query, query, value), 2, 2, 12),
        part="latent",
        saves=(SavedTensor("rotary angles", rope, format="angles"),)
        if shape.positions == "rope"
        else (),
    )
    names = {"query": query, "key": query, "value": value}
    yield _core(shape, tuple((name, width, "latent") for name, width in names.items()))
    yield _output(shape, value)


def _compressed_query(shape: ModelShape, query: Width) -> Iterator[Operator]:
    h, latent = whole(shape.hidden), whole(shape.q_lora_rank)
    yield Operator(
        name="query down",
        computes=MatrixProduct(h, (latent,), tokens="own"),
        parameters=_matrix("attention.q_down", h, latent),
        saves=(_attention_input(shape),),
        scaled=(3,),  # with the two that compress keys and values
    )
    yield _norm("query norm", ("attention.q_norm.weight",), shape.q_lora_rank, let_go=LATENT)
    yield Operator(
        name="query up",
        computes=MatrixProduct(latent, (query,)),
        part="latent",
        parameters=_matrix("attention.q_up", latent, query, again=LATENT),
        saves=(SavedTensor("compressed query", latent, "own", "operand"),),
        boundary=Boundary("columns", shape.q_lora_rank, True),
        scaled=(1,),
    )


def _mlp(shape: ModelShape) -> Iterator[Operator]:
    """SwiGLU or GELU between two products (Shazeer 2020, arXiv:2002.05202)."""
    h = whole(shape.hidden)
    let_go = frozenset({"norms", "operators"})
    up, activation, down = _feed_forward(shape, "mlp", "mlp", Width(shape.ffn))
    yield replace(
        up,
        saves=(SavedTensor("mlp input", h, "own", "operand", let_go), *up.saves),
        boundary=Boundary("columns", shape.hidden, True, frozenset({"operators", "mlp"})),
        scaled=(len(up.saves),),
    )
    yield activation
    yield replace(down, boundary=Boundary("rows", shape.hidden))


def _feed_forward(
    shape: ModelShape, name: str, prefix: str, f: Width
) -> tuple[Operator, Operator, Operator]:
    """Into a width, an activation function, and back; as it is where every token visits it."""
    h, gated, bias = whole(shape.hidden), shape.activation == "swiglu", shape.bias
    matrices = ("gate", "up") if gated else ("up",)
    before, after = frozenset({"mlp"}), frozenset({"mlp", "activation", "operators"})
    first = before | ({"operators"} if name == "mlp" else set())
    saves = [SavedTensor(f"{name}: second before activation", f, let_go=before)] * gated
    saves.append(SavedTensor(f"{name}: first before activation", f, let_go=first))
    up = Operator(
        name=f"{name} up",
        computes=MatrixProduct(h, (f,) * len(matrices)),
        part="mlp",
        parameters=sum(
            (
                _matrix(f"{prefix}.{n}", h, f, bias=bias, again=first if i == 0 else before)
                for i, n in enumerate(matrices)
            ),
            (),
        ),
        saves=tuple(saves),
        scaled=(1,) * len(matrices),
    )
    result = SavedTensor(f"{name}: after activation", f, format="operand", let_go=after)
    activation = Operator(
        name=f"{name} activation",
        computes=MemoryBound((f,), len(matrices) + 1, 2 * len(matrices) + 1),
        part="activation",
        saves=(result,),
    )
    down = Operator(
        name=f"{name} down",
        computes=MatrixProduct(f, (h,)),
        part="mlp",
        is_last=True,
        parameters=_matrix(f"{prefix}.down", f, h, bias=bias),
        scaled=(1,),
    )
    return up, activation, down


def _experts(shape: ModelShape) -> Iterator[Operator]:
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
            (whole(shape.experts),), 8, 8, ROUTER_KERNELS, tokens="own", element=4
        ),
    )
    yield Operator(
        name="dispatch",
        computes=MemoryBound((rows,), 3, 3, DISPATCH_KERNELS, tokens="routed"),
        saves=(SavedTensor("dispatched tokens", rows, "routed", "operand", gone),),
    )
    width = Width(shape.expert_width)
    for operator in _feed_forward(shape, "experts", "experts", width):
        yield _of_experts(operator, shape)
    yield Operator(
        name="combine",
        computes=MemoryBound((rows,), 3, 3, COMBINE_KERNELS, tokens="routed"),
        saves=(SavedTensor("expert results", rows, "routed", let_go=gone),),
        boundary=Boundary("rows", shape.hidden, beside_product=False),
    )
    if shape.shared_experts:
        shared = Width(shape.shared_experts * shape.expert_width)
        yield from _feed_forward(shape, "shared experts", "shared", shared)


def _router(shape: ModelShape) -> Operator:
    """Scores of all experts; it saves the affinities, the weights, and what these are made of.

    Every tensor-parallel rank routes the whole sequence in our trainer. Others give each its own
    part, and save logits and affinities.
    """
    h, let_go = whole(shape.hidden), frozenset({"norms", "operators"})
    chosen = shape.top_k + 1 if shape.normalised else 0  # with their sum
    scores = whole(shape.experts + shape.top_k + chosen)
    weight = Parameter("router.weight", (whole(shape.experts), h), "tp")
    return Operator(
        name="router",
        computes=MatrixProduct(h, (whole(shape.experts),), tokens="own"),
        parameters=(weight,),
        saves=(
            SavedTensor("mlp input", h, "routed", "operand", let_go),
            SavedTensor("router", scores, "routed", "fp32", others=2 * shape.experts),
        ),
        boundary=Boundary("gather", shape.hidden, again=let_go, beside_product=False),
    )


def _of_experts(operator: Operator, shape: ModelShape) -> Operator:
    """The same, done by the experts that each token visits, in a format of their own."""
    computes, count, gone = operator.computes, shape.top_k, frozenset({"experts"})
    if isinstance(computes, MemoryBound):
        widths = tuple(Width(width.pieces, width.each * count) for width in computes.widths)
        computes = computes._replace(widths=widths, tokens="routed")
    elif isinstance(computes, MatrixProduct):
        computes = computes._replace(tokens="routed")
    saves = tuple(
        tensor._replace(
            width=Width(tensor.width.pieces, count),
            tokens="routed",
            let_go=(tensor.let_go - {"mlp"} if "before" in tensor.name else tensor.let_go) | gone,
        )
        for tensor in operator.saves
    )
    return replace(
        operator,
        computes=computes,
        part=operator.part if operator.part == "activation" else "experts",
        is_last=False,
        parameters=tuple(
            p._replace(experts=shape.experts, again=gone) for p in operator.parameters
        ),
        saves=saves,
        scaled=(),
    )


def _embedding(shape: ModelShape) -> Iterator[Operator]:
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


def _head(shape: ModelShape) -> Iterator[Operator]:
    """Final norm, projection to the vocabulary, cross-entropy; a tied table is the embedding's."""
    h, table = whole(shape.hidden), Width(shape.vocab)
    yield _residual_norm("final norm", "norm", shape, is_input=True)
    yield Operator(
        name="head",
        computes=MatrixProduct(h, (table,)),
        parameters=(Parameter(f"{'embedding' if shape.tied else 'head'}.weight", (table, h)),),
        saves=(SavedTensor("head input", h, "own"),),
        boundary=Boundary("columns", shape.hidden),
    )
    yield Operator(
        name="loss",
        computes=CrossEntropy(table),
        saves=(
            SavedTensor("logits", table, format="logits"),
            SavedTensor("softmax sums", whole(1), format="statistics"),
        ),
    )
