"""The ledger of a block: the paper's formula under its assumptions, and what must always hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.activations import paper_layer_bytes
from phalanx.cost.saved import (
    MEGATRON,
    OURS,
    PAPER,
    Stack,
    block_saved,
    bytes_per_token,
    head_saved,
    kept,
)

GPT = ModelShape(
    hidden=1024, heads=16, activation="gelu", norm="layernorm", positions="learned", bias=True
)


def layer_bytes(shape: ModelShape, layout: Layout, seq: int, stack: Stack, layer: int = 0) -> float:
    saved = kept(block_saved(shape, layer, seq, 2, stack), layout.recompute)
    return layout.mb * seq * bytes_per_token(saved, layout)


@given(
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    sp=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    seq=st.integers(1, 64).map(lambda n: 64 * n),
    mb=st.integers(1, 8),
)
def test_under_the_papers_assumptions_all_rows_of_its_table_come_out(
    tp: int, sp: bool, recompute: str, seq: int, mb: int
):
    layout = Layout(tp=tp, sp=sp, recompute=recompute, mb=mb)
    ours = layer_bytes(GPT, layout, seq, PAPER)
    assert ours == pytest.approx(paper_layer_bytes(GPT, layout, seq), rel=1e-12)


def test_the_papers_breakdown_is_11_for_attention_19_for_the_mlp_and_4_for_the_norms():
    saved = block_saved(GPT, 0, 1, 2, PAPER)
    norms = [i for i in saved if i.name in ("attention norm input", "mlp norm input")]
    mlp = [i for i in saved if i.name.startswith("mlp") and i not in norms]
    core = [i for i in saved if i.part == "core"]
    attention = [i for i in saved if i not in norms and i not in mlp and i not in core]
    h, a = GPT.hidden, GPT.heads
    assert sum(i.bytes for i in norms) == 4 * h
    assert sum(i.bytes for i in mlp) == 19 * h
    assert sum(i.bytes for i in attention) == 11 * h
    assert sum(i.bytes for i in core) == 5 * a


SHAPES = [load.model(name) for name in ("llama-3-8b", "gpt2", "deepseek-v3", "mixtral-8x7b")]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("stack", [OURS, MEGATRON, PAPER], ids=lambda s: s.name)
def test_recomputing_more_never_keeps_more(shape: ModelShape, stack: Stack):
    last = shape.layers - 1
    kept_bytes = [
        layer_bytes(shape, Layout(tp=2, recompute=mode), 4096, stack, last)
        for mode in ("none", "selective", "full")
    ]
    assert kept_bytes == sorted(kept_bytes, reverse=True)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_sequence_parallelism_only_helps_and_fused_attention_forgets_the_sequence(
    shape: ModelShape,
):
    with_sp, without = (layer_bytes(shape, Layout(tp=8, sp=sp), 4096, OURS) for sp in (True, False))
    assert with_sp < without
    short, long = (bytes_per_token(block_saved(shape, 0, s, 2, OURS), Layout()) for s in (1, 9999))
    assert short == long


def test_grouped_heads_keep_fewer_keys_and_values():
    shape = load.model("llama-3-8b")
    items = {item.name: item.bytes for item in block_saved(shape, 0, 1, 2, OURS)}
    assert items["query"] == 4 * items["keys"]


def test_a_token_of_llama_3_8b_keeps_136_kb_per_block_on_one_gpu():
    # x, its norm, q, k, v, result, x, its norm: 2 (h h + h/4 h/4 + h h h), and 3 f in the MLP.
    h, g, f = 4096, 1024, 14336
    large = 2 * (6 * h + 2 * g + 3 * f)
    saved = block_saved(load.model("llama-3-8b"), 0, 8192, 2, MEGATRON)
    assert sum(item.bytes for item in saved) == pytest.approx(large, rel=0.002)


def test_dispatching_to_more_experts_keeps_more():
    def routed(k: int) -> float:
        shape = ModelShape(experts=16, top_k=k, moe_ffn=128)
        return layer_bytes(shape, Layout(), 128, OURS)

    assert routed(1) < routed(2) < routed(4)


def test_first_dense_layers_of_a_mixture_have_no_router():
    shape = load.model("deepseek-v3")
    names = [{item.name for item in block_saved(shape, layer, 1, 2, OURS)} for layer in (0, 60)]
    assert "router" not in names[0]
    assert {"router", "shared experts: after activation"} <= names[1]


def test_the_head_keeps_its_logits_in_fp32_cut_over_tp():
    shape = load.model("llama-3-8b")
    saved = {item.name: item for item in head_saved(shape, 2, OURS)}
    assert saved["logits"].bytes == 4 * 128256
    assert saved["logits"].cut == "tp"
