"""FLOP per token and utilization, against published figures."""

import pytest

from phalanx.catalog import load
from phalanx.core.errors import UsageError
from phalanx.core.model import ModelShape
from phalanx.core.recompute import FULL, NONE, SELECTIVE
from phalanx.cost.flops import (
    attention_flops_per_token,
    flops_per_token,
    matmul_params,
    recompute_flops_per_token,
    utilization,
)


def test_llama_3_8b_at_8192_costs_the_51_5_gflop_per_token_that_megatron_bridge_counts():
    shape = load.model("llama-3-8b")
    assert matmul_params(shape) == pytest.approx(7.505e9, rel=1e-4)
    assert flops_per_token(shape, 8192, causal=True) == pytest.approx(51.5e9, rel=1e-3)


def test_palm_540b_costs_what_its_appendix_counts():
    shape = load.model("palm-540b")
    # Appendix B: 6 N + 12 L H Q T, with 118 layers of 48 heads of 256, T = 2048.
    assert attention_flops_per_token(shape, 2048, causal=False) == 12 * 118 * 48 * 256 * 2048


def test_causal_counts_half_of_the_scores_and_nothing_else():
    shape = ModelShape()
    full = flops_per_token(shape, 512, causal=False)
    half = flops_per_token(shape, 512, causal=True)
    assert full - half == attention_flops_per_token(shape, 512, causal=True)


def test_a_tied_head_is_multiplied_with_although_it_is_stored_once():
    tied = ModelShape(tied=True)
    assert matmul_params(tied) == matmul_params(ModelShape(tied=False))


def test_learned_positions_are_looked_up_and_cost_nothing():
    learned = ModelShape(positions="learned", max_positions=4096)
    assert matmul_params(learned) == matmul_params(ModelShape())


def test_a_token_pays_for_the_experts_it_uses():
    dense = ModelShape(ffn=512)
    routed = ModelShape(ffn=512, experts=64, top_k=1, moe_ffn=512)
    router = routed.layers * routed.hidden * routed.experts
    assert matmul_params(routed) == matmul_params(dense) + router


def test_full_recompute_repeats_every_block_but_not_the_head():
    shape = ModelShape()
    forward = flops_per_token(shape, 256, causal=True) / 3
    again = recompute_flops_per_token(shape, 256, FULL)
    assert forward - again == 2 * shape.head_params()


def test_selective_recompute_repeats_a_third_of_the_attention_cost():
    shape = ModelShape()
    cost = recompute_flops_per_token(shape, 256, SELECTIVE, causal=False)
    assert 3 * cost == attention_flops_per_token(shape, 256, causal=False)


def test_no_recompute_costs_nothing_and_makes_hfu_equal_to_mfu():
    shape = ModelShape()
    assert recompute_flops_per_token(shape, 256, NONE) == 0
    used = utilization(shape, 256, tokens_per_second=1e3, peak=1e12)
    assert used.hfu == used.mfu


def test_utilization_at_the_peak_is_one():
    shape = ModelShape()
    peak = 5e4 * flops_per_token(shape, 256, causal=False)
    used = utilization(shape, 256, tokens_per_second=5e4, peak=peak, causal=False)
    assert used.mfu == pytest.approx(1.0)
    assert "12 L a d s" in used.convention


def test_a_peak_of_zero_is_refused():
    with pytest.raises(UsageError, match="positive"):
        utilization(ModelShape(), 256, tokens_per_second=1.0, peak=0.0)
