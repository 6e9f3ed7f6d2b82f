from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.catalog.sustained import sustained
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.recompute import Recompute
from phalanx.core.run import Recipe
from phalanx.cost.blocks import Slice, block_work, embedding_work, head_work
from phalanx.cost.compute import Machine, MemoryBoundKernel, Product, Scores, fill, price
from phalanx.cost.flops import flops_per_token
from phalanx.cost.framework import EAGER_FSDP, MEGATRON_2021, MEGATRON_CORE, PHALANX
from phalanx.cost.table import Choice, Table

RATES = sustained("h100-sxm")
MACHINE = Machine(peak=1e15, wide=1e15, hbm=3e12, element=2, accumulate=0.0, rates=RATES)
MODELS = [
    "llama-3.1-8b",
    "llama-2-7b",
    "gpt-3-175b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "deepseek-v3",
]


def slice_of(shape, layout="", framework=PHALANX, seq=4096):
    row = Layout.parse(f"{layout} precision=bf16")
    return Slice(Table.of(shape, Recipe(seq=seq, batch=row.dp * row.mb), [row]), framework)


def works_of(shape, cut):
    dense = shape.dense_layers if shape.is_moe else shape.layers
    works = [*embedding_work(cut), *head_work(cut)]
    for layer in range(shape.layers):
        works += block_work(cut, routed=layer >= dense)
    return works


def flops_of(works):
    """Forward, with the two gradients of each product and the two products of the scores'."""
    products = [6 * w.M * w.N * w.K * w.batch for w in works if isinstance(w, Product)]
    flops = sum(products) + sum(3 * w.flops for w in works if isinstance(w, Scores))
    return float(np.max(flops))


def repeated(works, mode, *, early):
    """Seconds of the forward that backward repeats."""
    again = price(works, MACHINE).repeated(Choice.of([Recompute.parse(mode)]), stops_early=early)
    return float(np.max(again.seconds))


def forward_of(works):
    return float(np.max(price(works, MACHINE).sum().F))


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_do_the_arithmetic_of_the_papers(name):
    shape = load.model(name)
    cut = slice_of(shape)
    counted = flops_of(works_of(shape, cut)) / cut.tokens[0]
    assert counted == pytest.approx(flops_per_token(shape, 4096, causal=True), rel=0.005)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-3-175b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("layout", ["tp=4", "tp=8", "tp=2 mb=2", "cp=2 dp=2"])
def test_a_rank_does_its_share_of_the_arithmetic(name, layout):
    shape, parts = load.model(name), Layout.parse(layout)
    whole = flops_of(works_of(shape, slice_of(shape)))
    part = flops_of(works_of(shape, slice_of(shape, layout)))
    share = parts.mb / (parts.tp * parts.cp)
    assert part == pytest.approx(whole * share, rel=0.05)  # compressing is whole on every rank


def test_unfused_attention_computes_the_whole_square():
    shape = replace(load.model("gpt-3-175b"), positions="learned")
    fused = flops_of(block_work(slice_of(shape), routed=False))
    stored = flops_of(block_work(slice_of(shape, framework=MEGATRON_2021), routed=False))
    scores = 12 * shape.heads * shape.head_dim * 4096 * 4096
    assert stored - fused == pytest.approx(scores / 2)


def test_a_large_product_runs_at_the_share_that_was_fitted():
    seconds = MACHINE.product_seconds(2**17, 2**17, 2**17)
    ideal = 2 * (2**17) ** 3 / 1e15
    assert ideal / seconds == pytest.approx(RATES.product, rel=0.02)


def test_a_thin_product_takes_as_long_as_its_bytes():
    seconds = MACHINE.product_seconds(8, 8192, 8192)
    moved = 2 * (8 * 8192 + 8192 * 8192 + 8 * 8192)
    assert seconds == pytest.approx(moved / (3e12 * RATES.memory))


def test_half_the_rate_is_reached_at_the_depth():
    deep = MACHINE.product_seconds(2**14, 2**14, 2**20) / 2**20
    short = MACHINE.product_seconds(2**14, 2**14, RATES.depth) / RATES.depth
    assert short / deep == pytest.approx(2.0, rel=0.01)


def test_a_format_twice_as_fast_gains_less_than_twice():
    fast = replace(MACHINE, peak=2e15, element=1)
    gain = MACHINE.product_seconds(4096, 4096, 4096) / fast.product_seconds(4096, 4096, 4096)
    assert 1.2 < gain < 2.0


def test_a_result_of_whole_waves_fills_the_cores():
    assert fill(256 * 12, 128 * 11, 1, 132) == 1.0
    assert fill(256 * 12, 128 * 11 + 1, 1, 132) < 0.96
    assert fill(64, 64, 1, 1) == 1.0


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 8))
def test_no_result_fills_more_than_the_cores(M, N, batch):
    assert 0 < fill(M, N, batch, 132) <= 1.0


def priced(work, machine=MACHINE):
    """Seconds in F, I and W."""
    return price([work], machine).sum()


def test_backward_of_a_product_is_two_products():
    work = Product("square", 4096, 4096, 4096)
    assert priced(work).F == priced(work).I == priced(work).W
    peak = price([work], MACHINE).at_peak(Product)
    assert peak.total == pytest.approx(6 * 4096**3 / 1e15)


def test_adding_gradients_up_hides_behind_a_deep_product_and_not_behind_a_thin_one():
    machine = replace(MACHINE, rates=replace(RATES, depth=200.0))  # thin products wait for bytes
    adding = replace(machine, accumulate=8.0)
    deep, thin = Product("deep", 16384, 4096, 4096), Product("thin", 64, 4096, 4096)
    assert priced(deep, adding) == priced(deep, machine)
    assert priced(thin, adding).W > 1.5 * priced(thin, machine).W


def test_first_generation_attention_is_slower():
    later, first = Scores("attention", 1e12), Scores("attention", 1e12, first=True)
    assert priced(first).F > 1.5 * priced(later).F


def test_full_recomputation_repeats_a_forward_and_early_stopping_less():
    shape = load.model("llama-2-7b")
    works = block_work(slice_of(shape, framework=MEGATRON_CORE), routed=False)
    forward = forward_of(works)
    assert repeated(works, "full", early=False) == pytest.approx(forward)
    down = shape.ffn / (4 * shape.hidden + 3 * shape.ffn)  # share of products
    assert repeated(works, "full", early=True) == pytest.approx(forward * (1 - down), rel=0.08)


@pytest.mark.parametrize("name", ["llama-2-7b", "deepseek-v3"])
def test_every_part_repeats_some_of_the_forward(name):
    works = block_work(slice_of(load.model(name), framework=MEGATRON_CORE), routed="v3" in name)
    modes = ["selective", "norms", "activation", "operators", "mlp"]
    modes += ["latent", "experts"] if "v3" in name else []
    seconds = {mode: repeated(works, mode, early=False) for mode in modes}
    assert all(0 < time < forward_of(works) for time in seconds.values())
    assert repeated(works, "none", early=False) == 0
    both = repeated(works, "norms+mlp", early=False)
    assert both == pytest.approx(seconds["norms"] + seconds["mlp"])


def test_a_table_of_layouts_is_priced_row_by_row():
    shape, lines = load.model("llama-3.1-8b"), ["tp=2", "tp=4 mb=2", "cp=2 recompute=full"]
    rows = [Layout.parse(f"{line} precision=bf16") for line in lines]
    table = Table.of(shape, Recipe(seq=4096, batch=8), rows)
    together = price(block_work(Slice(table, PHALANX), routed=False), MACHINE)
    again = together.repeated(table.recompute, stops_early=True)
    for place, line in enumerate(lines):
        works = block_work(slice_of(shape, line), routed=False)
        assert together.sum().F[place] == pytest.approx(forward_of(works))
        mode = str(rows[place].recompute)
        assert again.seconds[place] == pytest.approx(repeated(works, mode, early=True))


def test_programs_that_fuse_less_move_more_bytes():
    shape = ModelShape(name="gpt", hidden=2048, heads=16, activation="gelu", positions="learned")
    moved = [
        sum(
            float(np.max(w.forward + w.backward))
            for w in block_work(cut, routed=False)
            if isinstance(w, MemoryBoundKernel)
        )
        for cut in (
            slice_of(shape, framework=p) for p in (MEGATRON_CORE, EAGER_FSDP, MEGATRON_2021)
        )
    ]
    assert moved == sorted(moved)
