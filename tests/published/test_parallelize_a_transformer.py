"""Claims printed in "How to Parallelize a Transformer for Training" beside its worked numbers."""

import pytest
from worked import (
    B200,
    B200_PEAK,
    GB200,
    GEMMA,
    H100,
    H100_PEAK,
    LLAMA_13B,
    LLAMA_70B,
    NODE,
    OUT,
    RIDGE,
    V5P,
)

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.cost.clocks import (
    Axes,
    data_clocks,
    estimated_params,
    expert_width,
    mixed_best_dp,
    mixed_floor,
    tensor_clocks,
    tensor_width,
)
from phalanx.cost.collectives import Level, gather_bandwidth
from phalanx.cost.roofline import (
    LayerSizes,
    block_of,
    domain_weights_floor,
    tensor_limit,
    weights_floor,
)
from phalanx.cost.state import BOOK_ADAM, largest_model

ICI = 2 * V5P.domain.link.bandwidth


# First, Feel the Roofline


def test_when_weights_travel_a_bigger_batch_hides_them():
    block, peak = block_of(LLAMA_13B), V5P.peak("bf16")
    small = data_clocks(block, 1e6, 4096, peak, ICI)
    large = data_clocks(block, 2e6, 4096, peak, ICI)
    assert large.network == small.network
    assert large.compute == 2 * small.compute


def test_when_activations_travel_no_batch_hides_them():
    block, peak = block_of(LLAMA_13B), V5P.peak("bf16")
    few, many = (tensor_clocks(block, T, 16, peak, ICI).ratio for T in (1e4, 1e6))
    assert few == pytest.approx(many, rel=1e-12)


# Tensor Parallelism


@pytest.mark.parametrize("width", [LLAMA_70B.ffn, GEMMA.ffn])
def test_eight_way_tp_fits_a_v5p_and_sixteen_way_does_not(width: int):
    assert tensor_width(RIDGE, 8) < width < tensor_width(RIDGE, 16)


def test_gemma_with_both_gate_inputs_counted_would_reach_nineteen_ways():
    # The page corrects the book: F near 50k counts two of three matrices twice.
    assert int(tensor_limit(2 * GEMMA.ffn, RIDGE)) == 19
    assert int(tensor_limit(GEMMA.ffn, RIDGE)) == 9


def test_the_limit_does_not_depend_on_the_precision():
    # int8 halves the bytes and doubles the rate: ridge doubles, bytes per number halve.
    assert tensor_limit(2 * LLAMA_70B.ffn, 2 * RIDGE) == tensor_limit(LLAMA_70B.ffn, RIDGE)


# Combining FSDP and Tensor Parallelism


def test_the_books_example_rounds_to_sixteen_by_four():
    best = mixed_best_dp(48_000, 32_768, 64)
    nearest = min((1, 2, 4, 8, 16, 32, 64), key=lambda dp: abs(dp - best))
    assert (nearest, 64 // nearest) == (16, 4)


def test_mixing_reaches_below_either_scheme_alone():
    assert mixed_floor(32_768, RIDGE) < weights_floor(RIDGE, axes=3)


# Where the bounds land on this fabric


def test_inside_a_node_2200_tokens_and_beyond_it_2475():
    assert NODE == 2200
    assert domain_weights_floor(H100_PEAK, H100) == OUT == 2475


def test_two_nodes_are_limited_inside_the_node_not_between_them():
    # With no inner sharding: (X-1)/X halves the network's 2,475 to 1,237.5, but the ring inside
    # the node still needs 2,200 x 7/8 = 1,925.
    two = gather_bandwidth((Level(8, H100.local), Level(2, H100.egress)))
    assert H100_PEAK / two == pytest.approx(1925)


def test_an_inner_axis_of_16_does_reach_1237_5_and_one_of_8_does_not():
    assert domain_weights_floor(H100_PEAK, H100, inner=16) == 1237.5
    assert domain_weights_floor(H100_PEAK, H100, inner=8) == 2475


def test_gb200_racks_are_limited_inside_at_2500_tokens_not_625():
    assert B200_PEAK / GB200.egress == 625
    assert domain_weights_floor(B200_PEAK, GB200) == 2500
    assert domain_weights_floor(B200_PEAK, B200) == 5625


def test_16_384_h100s_want_40_6m_tokens_and_llama_3_gave_16m():
    wanted = 16384 * domain_weights_floor(H100_PEAK, H100)
    assert wanted == pytest.approx(40.6e6, rel=0.002)
    assert wanted > 16 * 2**20


def test_llama_3s_sixteen_stages_cut_its_critical_batch_below_what_it_used():
    assert 16384 * weights_floor(OUT, p=16) < 16e6


def test_two_node_tp_is_hidden_by_llama_70b_up_to_sixteen_ways():
    assert tensor_width(OUT, 16, H100.G) <= LLAMA_70B.ffn < tensor_width(OUT, 20, H100.G)


# Expert Parallelism


def test_deepseeks_narrow_experts_hide_two_nodes_of_ep_but_not_eight():
    deepseek = load.model("deepseek-v3")
    assert expert_width(OUT, 16, 8, deepseek.top_k) > deepseek.moe_ffn
    assert expert_width(OUT, 64, 8, deepseek.top_k) > 8 * deepseek.moe_ffn


def test_sparse_models_need_e_over_k_more_tokens():
    dense, sparse = LayerSizes(2880, 2880), LayerSizes(2880, 2880, 128, 4)
    assert weights_floor(OUT, sparse.sparsity) == 32 * weights_floor(OUT, dense.sparsity)


# Examples


def test_deepseek_v3_gives_each_gpu_about_30k_tokens_per_step():
    assert pytest.approx(30e3, rel=0.03) == 4096 * 15360 / 2048
    assert Layout(pp=16, dp=128, ep=64).ranks == 2048


# What Do We Mean By Scaling?


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("llama-3-70b", 0.02), ("llama-3.1-405b", 0.03), ("deepseek-v3", 0.05)],
)
def test_the_pages_estimate_of_weights_is_within_a_few_percent(name: str, tolerance: float):
    shape = load.model(name)
    estimate = estimated_params(block_of(shape), shape.layers)
    assert estimate == pytest.approx(shape.params(), rel=tolerance)


def test_a_v5p_chip_holds_at_most_a_9_billion_parameter_model_alone():
    assert 9e9 < largest_model(V5P.memory, BOOK_ADAM) < 10e9


# Some Problems to Work


def test_question_3_cannot_be_pure_fsdp_but_can_be_mixed():
    per_chip = 3e6 / 4096
    assert mixed_floor(LLAMA_13B.ffn, RIDGE, Axes()) < per_chip < weights_floor(RIDGE, axes=3)


def test_question_3_takes_about_300_ms_at_40_percent():
    seconds = 3e6 * 6 * 13e9 / (4096 * V5P.peak("bf16") * 0.4)
    assert seconds == pytest.approx(0.3, abs=0.02)
