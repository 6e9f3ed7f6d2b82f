"""Formulas of books and papers: floors and limits are where the two clocks of a layer agree."""

from math import isclose

import pytest
from formulas import paper_first_stage_bytes, young_interval
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.clocks import (
    Axes,
    data_clocks,
    expert_clocks,
    expert_width,
    mixed_best_dp,
    mixed_clocks,
    mixed_floor,
    pipeline_hops,
    tensor_clocks,
)
from phalanx.cost.reliability import daly_interval
from phalanx.cost.roofline import LayerSizes, SwitchedFabric, tensor_limit, weights_floor

PAPER = ModelShape(hidden=1024, heads=16)
peaks = st.floats(1e14, 5e15)
rates = st.floats(1e10, 1e12)
widths = st.integers(256, 100_000)
counts = st.integers(2, 10_000)


@given(peaks, rates, widths, counts, st.integers(1, 64))
def test_at_the_weights_floor_data_parallelism_is_just_hidden(
    C: float, W: float, f: int, n: int, k: int
):
    block = LayerSizes(4096, f, E=64, k=k)
    T = n * weights_floor(C / W, block.sparsity)
    assert data_clocks(block, T, n, C, W).ratio == pytest.approx(1)


@given(peaks, rates, widths, st.floats(1, 1e8))
def test_at_the_tensor_limit_tensor_parallelism_is_just_hidden(
    C: float, W: float, f: int, T: float
):
    t = tensor_limit(f, C / W)
    block = LayerSizes(4096, f)
    clocks = tensor_clocks(block, T, 1, C * t, W)  # tp = t of one chip as one of t times the peak
    assert clocks.ratio == pytest.approx(1)


@given(st.integers(10, 16), st.integers(1, 2), st.integers(1, 2), peaks, rates)
def test_at_the_mixed_floor_the_best_mix_is_just_hidden(
    doublings: int, M_dp: int, M_tp: int, C: float, W: float
):
    n, f, axes, ridge = 4096, 2**doublings, Axes(M_dp, M_tp), C / W
    T = n * mixed_floor(f, ridge, axes)
    dp = mixed_best_dp(T, f, n, axes)
    clocks = mixed_clocks(LayerSizes(8192, f), T, (dp, n / dp), axes, C, W)  # type: ignore[arg-type]
    assert clocks.ratio == pytest.approx(1)


@given(st.integers(1, 12), peaks, rates)
def test_no_other_mix_communicates_less_than_the_best(doublings: int, C: float, W: float):
    n, T, f, axes = 4096, 4e6, 32768, Axes()
    best = mixed_best_dp(T, f, n, axes)

    def network(dp: float) -> float:
        return mixed_clocks(LayerSizes(8192, f), T, (dp, n / dp), axes, C, W).network  # type: ignore[arg-type]

    assert network(best) <= network(2.0**doublings) * (1 + 1e-12)


def test_without_overlap_the_mixed_floor_is_four_times_as_high():
    assert mixed_floor(32768, 2550, overlap=False) == 4 * mixed_floor(32768, 2550)


@given(st.integers(9, 512), st.integers(1, 16))
def test_at_the_expert_width_the_network_is_just_hidden(e: int, k: int):
    fabric = SwitchedFabric(8, 1e30, 400e9)
    f = expert_width(990e12 / fabric.egress, e, fabric.G, k)
    ratio = expert_clocks(LayerSizes(7168, f, 256, k), 1e6, e, 990e12, fabric).ratio  # type: ignore[arg-type]
    assert isclose(ratio, 1, rel_tol=1e-9)


def test_experts_inside_one_domain_wait_for_its_own_links_only():
    fabric = SwitchedFabric(8, 450e9, 400e9)
    clocks = expert_clocks(LayerSizes(4096, 2048, 64, 2), 1e6, 4, 1e15, fabric)
    assert clocks.network == pytest.approx(4 * 1e6 * 4096 * 3 / (4 * 450e9) * 2 / 4)
    with pytest.raises(UsageError, match="inside one domain"):
        expert_width(2475, 8, 8, 2)


def test_one_stage_passes_nothing_on():
    assert pipeline_hops(4096, 1e6, 1, 8, 50e9).seconds == 0
    assert pipeline_hops(4096, 1e6, 16, 64, 50e9).seconds == pytest.approx(
        78 * 2 * 1e6 * 4096 / (64 * 50e9)
    )


def test_interleaving_keeps_more_on_the_first_rank():
    plain = Layout(pp=8, recompute="selective")
    chunks = Layout(pp=8, v=4, schedule="interleaved", recompute="selective")
    ratio = paper_first_stage_bytes(PAPER, chunks, 512) / paper_first_stage_bytes(PAPER, plain, 512)
    assert ratio == pytest.approx(1 + 7 / 32)


def test_youngs_interval_is_dalys_when_writing_is_quick():
    assert daly_interval(0.01, 1e6) == pytest.approx(young_interval(0.01, 1e6), rel=1e-3)
