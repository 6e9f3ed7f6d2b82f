"""Attention of grouped heads, and latent attention: one function for each kind.

Symbols: h hidden, a heads, g kv heads, d head size.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.core.operator import (
    AttentionCore,
    Boundary,
    MatrixProduct,
    MemoryBound,
    Operator,
    Parameter,
    SavedTensor,
    Width,
    whole,
)
from phalanx.core.operators.common import matrix, norm

if TYPE_CHECKING:  # a shape counts its parameters by these
    from phalanx.core.model import ModelShape

LATENT = frozenset({"latent"})  # what goes where latent attention is computed again


def grouped_attention(shape: "ModelShape") -> Iterator[Operator]:
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
                matrix(f"attention.{n}", h, out, bias=bias, again=again.get(n, frozenset()))
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
            saves=(SavedTensor("rotary angles", whole(shape.rotary_dim), format="angles"),),
        )
    if shape.qk_norm:
        yield _head_norms(shape)
    yield _core(shape, (("query", query, ""), ("keys", keys, "operators"), ("values", keys, "")))
    yield _output(shape, Width(a, d))


def _attention_input(shape: "ModelShape") -> SavedTensor:
    freed_by = frozenset({"norms", "operators"})
    is_input = shape.norms == "after"  # what the block is given, as no norm stands before
    return SavedTensor(
        "attention input",
        whole(shape.hidden),
        "own",
        "operand",
        frozenset() if is_input else freed_by,
        is_input,
    )


def _head_norms(shape: "ModelShape") -> Operator:
    """A norm of each query and each key head, whose scales all heads share (Qwen3)."""
    d = shape.head_dim
    heads, together = {"query": shape.heads, "key": shape.kv_heads}, shape.norm_all_heads
    saves = []
    for name, count in heads.items():
        statistics = whole(1) if together else Width(count)
        saves.append(SavedTensor(f"{name} norm input", Width(count, d)))
        saves.append(SavedTensor(f"{name} norm statistics", statistics, format="statistics"))
    widths = [count * d if together else d for count in heads.values()]
    return Operator(
        name="query and key norm",
        computes=MemoryBound(tuple(Width(count, d) for count in heads.values()), 2, 3, 2),
        parameters=tuple(
            Parameter(f"attention.{n}_norm.weight", (whole(width),), "tp")
            for n, width in zip(("q", "k"), widths, strict=True)
        ),
        saves=tuple(saves),
    )


def _core(shape: "ModelShape", inputs: tuple[tuple[str, Width, str], ...]) -> Operator:
    """What queries, keys and values go into, each with the part that makes it again, and result."""
    value = shape.kv_width - shape.qk_width
    saves = [
        SavedTensor(name, width, freed_by=frozenset({part} - {""})) for name, width, part in inputs
    ]
    # attention reads its result as it is, and the product behind it as it multiplies
    saves.append(SavedTensor("attention result", Width(shape.heads, value), format="both"))
    return Operator(
        name="attention",
        computes=AttentionCore(Width(shape.heads), Width(shape.kv_heads), shape.qk_width, value),
        part="core",
        parameters=(Parameter("attention.sinks.weight", (Width(shape.heads),)),) * shape.sinks,
        saves=tuple(saves),
    )


def _output(shape: "ModelShape", result: Width) -> Operator:
    h = whole(shape.hidden)
    return Operator(
        name="attention output",
        computes=MatrixProduct(result, (h,)),
        parameters=matrix("attention.o", result, h, bias=shape.bias and not shape.is_mla),
        boundary=Boundary("rows", shape.hidden),
        scaled=(1,),
    )


def latent_attention(shape: "ModelShape") -> Iterator[Operator]:
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
            parameters=matrix("attention.q", h, query),
            saves=(_attention_input(shape),),
            boundary=Boundary("columns", shape.hidden, True),
            scaled=(1,),
        )
    yield Operator(
        name="key-value down",
        computes=MatrixProduct(h, (whole(r_kv + shape.qk_rope),), tokens="own"),
        parameters=(
            *matrix("attention.kv_down", h, whole(r_kv)),
            *matrix("attention.k_rope", h, rope),
        ),
        boundary=Boundary("gather", shape.qk_rope, beside_product=False),
        scaled=() if r_q else (2,),
    )
    yield norm("key-value norm", ("attention.kv_norm.weight",), r_kv, freed_by=LATENT)
    latent = whole(r_kv)
    yield Operator(
        name="key-value up",
        computes=MatrixProduct(latent, (key, value)),
        part="latent",
        parameters=(
            *matrix("attention.k_up", latent, key, again=LATENT),
            *matrix("attention.v_up", latent, value, again=LATENT),
        ),
        saves=(SavedTensor("compressed key-value", latent, "own", "operand"),),
        boundary=Boundary("columns", r_kv, True),
        scaled=(2,),
    )
    yield Operator(
        name="join and rotate",
        computes=MemoryBound((query, query, value), 2, 2, 12, fused_kernels=4),
        part="latent",
        saves=(SavedTensor("rotary angles", rope, format="angles"),)
        if shape.positions == "rope"
        else (),
    )
    names = {"query": query, "key": query, "value": value}
    yield _core(shape, tuple((name, width, "latent") for name, width in names.items()))
    yield _output(shape, value)


def _compressed_query(shape: "ModelShape", query: Width) -> Iterator[Operator]:
    h, latent = whole(shape.hidden), whole(shape.q_lora_rank)
    yield Operator(
        name="query down",
        computes=MatrixProduct(h, (latent,), tokens="own"),
        parameters=matrix("attention.q_down", h, latent),
        saves=(_attention_input(shape),),
        scaled=(3,),  # with the two that compress keys and values
    )
    yield norm("query norm", ("attention.q_norm.weight",), shape.q_lora_rank, freed_by=LATENT)
    yield Operator(
        name="query up",
        computes=MatrixProduct(latent, (query,)),
        part="latent",
        parameters=matrix("attention.q_up", latent, query, again=LATENT),
        saves=(SavedTensor("compressed query", latent, "own", "operand"),),
        boundary=Boundary("columns", shape.q_lora_rank, True),
        scaled=(1,),
    )
