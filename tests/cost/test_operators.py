"""One operator more, described once, changes all that is counted of its block, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operator import (
    BlockOperators,
    Boundary,
    MatrixProduct,
    MemoryBound,
    ModelOperators,
    Operator,
    Parameter,
    SavedTensor,
    Width,
    whole,
)
from phalanx.core.operators import blocks, describe, elements, parameters_of
from phalanx.core.run import Recipe
from phalanx.cost.blocks import Slice, kernels
from phalanx.cost.compute import Product
from phalanx.cost.framework import MEGATRON_CORE
from phalanx.cost.messages import messages, setting, times_in_step
from phalanx.cost.params import unit_sizes
from phalanx.cost.saved import OURS, bytes_per_token, saved_by
from phalanx.cost.table import Table

SHAPE = ModelShape(layers=4, hidden=512, heads=8, kv_heads=4, ffn=1024, vocab=1000)
TP, SEQ = 4, 64
GATE = SHAPE.hidden * SHAPE.heads * SHAPE.head_dim  # elements of the matrix below


def gated(model: ModelOperators, shape: ModelShape) -> ModelOperators:
    """The same model with gated attention: its result times sigmoid(W x) (arXiv:2505.06708)."""
    h, heads = whole(shape.hidden), Width(shape.heads, shape.head_dim)
    gate = Operator(
        name="attention gate",
        computes=MatrixProduct(h, (heads,)),
        parameters=(Parameter("attention.gate.weight", (heads, h)),),
        saves=(SavedTensor("gate", heads),),
        boundary=Boundary("columns", shape.hidden, low_precision=True),
        scaled=(1,),
    )
    times = Operator(
        name="gated result",
        computes=MemoryBound((heads,), 3, 5),
        saves=(SavedTensor("gated result", heads, format="operand"),),
    )
    *before, output, residual = model.dense.attention
    attention = (*before, gate, times, output, residual)
    return replace(model, dense=BlockOperators(attention, model.dense.mlp))


PLAIN = describe(SHAPE)
GATED = gated(PLAIN, SHAPE)


def test_it_adds_its_matrix_to_every_block_and_its_share_to_every_rank():
    assert elements(GATED.dense.all) - elements(PLAIN.dense.all) == GATE
    table = Table.of(SHAPE, Recipe(seq=SEQ), [Layout(tp=TP)])
    more, less = (
        {(s.unit, s.name): s.params.item() for s in unit_sizes(table, model)}
        for model in (GATED, PLAIN)
    )
    assert {k: more[k] - less[k] for k in more if more[k] != less[k]} == {
        ("dense block", "block"): GATE // TP
    }


def test_it_saves_its_gate_and_its_result():
    more, less = (
        bytes_per_token(saved_by(model.dense.all, SEQ, 2, OURS), Layout(tp=TP))
        for model in (GATED, PLAIN)
    )
    assert more - less == 2 * 2 * SHAPE.heads * SHAPE.head_dim / TP


def test_it_runs_one_product_and_one_memory_bound_kernel_more():
    layout = Layout.parse(f"tp={TP} precision=bf16")
    cut = Slice(Table.of(SHAPE, Recipe(seq=SEQ, batch=1), [layout]), MEGATRON_CORE)
    more, less = (kernels(model.dense.all, cut) for model in (GATED, PLAIN))
    known = {work.name for work in less}
    product, multiply = (work for work in more if work.name not in known)
    assert isinstance(product, Product)
    assert (product.M.item(), (product.N * product.K).item()) == (SEQ, GATE / TP)
    assert multiply.forward.item() == 3 * 2 * SEQ * SHAPE.hidden / TP


@pytest.mark.parametrize("line", ["tp=4", "tp=4 sp=off", "dp=4 zero=3 tp=4"])
def test_its_input_is_gathered_and_its_gradient_reduced(line: str):
    layout = Layout.parse(f"{line} precision=bf16")
    table = Table.of(SHAPE, Recipe(seq=SEQ, batch=8), [layout])

    def sent(model: ModelOperators) -> dict[tuple[str, str], int]:
        where, totals = setting(table, model=model), dict[tuple[str, str], int]()
        for message in messages(where):
            times = times_in_step(message, where.held, table.m)
            name = (message.axis, message.purpose)
            totals[name] = totals.get(name, 0) + int((message.bytes * times).item())
        return totals

    more, less = sent(GATED), sent(PLAIN)
    added = {name: more[name] - less[name] for name in more if more[name] != less[name]}
    m, layers = table.m.item(), SHAPE.layers
    inputs = layers * m * SEQ * SHAPE.hidden * 2
    expected = {("tensor", "tp input gradient"): inputs}
    if layout.sequence_parallel:
        expected[("tensor", "tp input")] = expected[("tensor", "tp input again")] = inputs
    if layout.dp > 1:
        matrices = layers * m * GATE // TP
        expected[("data", "gradients")] = 4 * matrices
        expected[("data", "weights")] = 2 * 2 * matrices
    assert added == expected


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gpt2", "qwen3-4b", "mixtral-8x7b", "deepseek-v3", "gpt-3-175b"]
)
def test_the_parameters_of_all_operators_are_those_of_the_model(name: str):
    shape = load.model(name)
    model = describe(shape)
    counted = sum(count * elements(block) for block, count in blocks(shape))
    ends = {p.name: p.elements() for p in parameters_of((*model.embedding, *model.head))}
    assert counted + sum(ends.values()) == shape.params()
    active = sum(count * elements(block, shape.top_k) for block, count in blocks(shape))
    assert active + sum(ends.values()) == shape.active_params()


def test_ranks_hold_every_channel_between_them_once():
    for width in (Width(7), Width(8, 3), Width(5, 2)):
        for t in (1, 2, 3, 5):
            held = [int(width.held(np.array(t), index)) for index in range(t)]
            assert sum(held) == width.channels
            assert held[0] == max(held)
