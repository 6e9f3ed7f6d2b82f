"""The list of operators names the parameters that the trainer declares, cut as the trainer cuts."""

from dataclasses import replace

import numpy as np
import pytest

from phalanx.core.model import ModelShape
from phalanx.core.operator import Operators
from phalanx.core.operators import describe, parameters_of
from phalanx.core.run import Recipe
from phalanx.trainer.model.block import Block
from phalanx.trainer.model.ends import Embedding, Head
from phalanx.trainer.model.parameters import Declaration, Share, declared_in
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.tensor import TensorParallel

LLAMA = ModelShape(layers=1, hidden=64, heads=8, kv_heads=4, ffn=194, vocab=97)
GPT = replace(
    LLAMA,
    kv_heads=8,
    tied=True,
    activation="gelu",
    norm="layernorm",
    positions="learned",
    bias=True,
)
QWEN = replace(LLAMA, qk_norm=True, qkv_bias=True)
LATENT = replace(
    LLAMA, kv_heads=8, q_lora_rank=24, kv_lora_rank=20, qk_nope=12, qk_rope=6, v_head=14
)
DEEPSEEK = replace(LATENT, experts=8, top_k=4, moe_ffn=42, shared_experts=2)
SHAPES = {
    "llama": LLAMA,
    "gpt": GPT,
    "qwen": QWEN,
    "latent": LATENT,
    "direct": replace(LATENT, q_lora_rank=0),
    "mixtral": replace(LLAMA, experts=4, top_k=2),
    "deepseek": DEEPSEEK,
    "deepseek-gelu": replace(DEEPSEEK, activation="gelu"),
    "gemma": replace(QWEN, norms="both", activation="geglu", tied=True),
    "sinks": replace(LLAMA, sinks=True),
    "neox": replace(GPT, positions="rope", parallel_branches=True, rotary_share=0.5),
    "olmo": replace(LLAMA, norms="after", qk_norm=True, norm_all_heads=True),
}


def declared(shape: ModelShape, tp: int, *, sp: bool) -> dict[str, Declaration]:
    """What the modules of the trainer declare on one of `tp` ranks."""
    group = Group("tensor", range(tp), None, Ledger())
    cut, recipe = TensorParallel(group, sequence=sp), Recipe()
    embedding = Embedding(shape, recipe, cut)
    head = Head(shape, recipe, cut, embedding.table if shape.tied else None)
    modules = (embedding, Block(0, shape, recipe, cut), head)
    found = [held.declaration for module in modules for held in declared_in(module)]
    return {each.name.removeprefix("blocks.0."): each for each in found}


def listed(shape: ModelShape) -> Operators:
    model = describe(shape)
    block = model.block(routed=shape.routes(0)).all
    return model.embedding + block + model.head


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_is_listed_with_its_share_of_each_rank(name: str, tp: int, sp: bool):
    declarations = declared(SHAPES[name], tp, sp=sp and tp > 1)
    parameters = {each.name: each for each in parameters_of(listed(SHAPES[name]))}
    assert set(parameters) == set(declarations)
    for each in parameters.values():
        theirs = declarations[each.name]
        assert each.elements() == np.prod(theirs.shape)
        assert (each.experts > 0) == (theirs.expert_dim is not None)
        held = [int(each.held(np.array(tp), i)) * max(each.experts, 1) for i in range(tp)]
        assert held == [np.prod(theirs.box(Share(tp, i)).sizes) for i in range(tp)]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_that_are_parts_of_a_sum_are_the_same(name: str, sp: bool):
    declarations = declared(SHAPES[name], 4, sp=sp)
    for each in parameters_of(listed(SHAPES[name])):
        is_partial = each.tp_reduce == "tp" or (each.tp_reduce == "sp" and sp)
        assert is_partial == declarations[each.name].needs_tp_reduce, each.name
