import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ScheduleError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.schedule import Kind
from phalanx.core.timeline import Span, Timeline
from phalanx.planner.simulate import idle_within, occupancy, peak_in_flight, simulate
from phalanx.schedules.build import build, forward_only, lowered
from phalanx.schedules.text import from_csv

ranks = st.integers(1, 8)
micro_batches = st.integers(1, 24)
seconds = st.floats(0.125, 8)


@given(name=st.sampled_from(["gpipe", "1f1b"]), p=ranks, m=micro_batches, f=seconds, b=seconds)
def test_gpipe_and_1f1b_last_m_plus_p_minus_1_pairs_whatever_a_pair_costs(name, p, m, f, b):
    found = occupancy(simulate(build(name, p, m), {Kind.FORWARD: f, Kind.BACKWARD: b}))
    assert found.makespan == pytest.approx((m + p - 1) * (f + b))
    assert found.ideal == pytest.approx(m * (f + b))
    assert found.bubble_over_ideal == pytest.approx((p - 1) / m, abs=1e-9)
    assert found.idle_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)


@given(p=st.integers(2, 8), rounds=st.integers(1, 4), v=st.integers(2, 4), f=seconds, b=seconds)
def test_v_chunks_divide_the_bubble_by_v(p, rounds, v, f, b):
    m = p * rounds
    schedule = build("interleaved", p, m, v)
    found = occupancy(simulate(schedule, {Kind.FORWARD: f, Kind.BACKWARD: b}))
    assert found.bubble_over_ideal == pytest.approx((p - 1) / (v * m))
    assert found.idle_fraction == pytest.approx((p - 1) / (v * m + p - 1))


def cheap_weight_gradients(f: float, i: float, w: float) -> dict[Kind, float]:
    """Costs for which the handcrafted schedules are exact: W <= F and W <= I."""
    return {Kind.FORWARD: f, Kind.INPUT_GRAD: i, Kind.WEIGHT_GRAD: min(w, f, i)}


@given(p=ranks, extra=st.integers(0, 12), costs=st.builds(cheap_weight_gradients, *[seconds] * 3))
def test_zb_h1_leaves_the_bubble_of_its_paper(p, extra, costs):
    # Qi et al. 2024 (arXiv:2401.10241), section 2.3: (p - 1)(T_F + T_B - T_W), peak p M_B.
    schedule = build("zb-h1", p, p + extra)
    f, i, w = costs.values()
    assert max(idle_within(simulate(schedule, costs))) == pytest.approx((p - 1) * (f + i - w))
    assert peak_in_flight(schedule) == (p,) * p


@given(p=ranks, extra=st.integers(0, 12), costs=st.builds(cheap_weight_gradients, *[seconds] * 3))
def test_zb_h2_leaves_the_bubble_of_its_paper(p, extra, costs):
    # Ibid.: (p - 1)(T_F + T_B - 2 T_W), peak (2 p - 1) M_B.
    schedule = build("zb-h2", p, 2 * p - 1 + extra)
    f, i, w = costs.values()
    bubble = max(idle_within(simulate(schedule, costs)))
    assert bubble == pytest.approx((p - 1) * (f + i - 2 * w), abs=1e-9)
    assert peak_in_flight(schedule) == (2 * p - 1,) * p


@given(p=ranks, extra=st.integers(0, 12))
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(p, extra):
    # Ibid., section 6: zero bubble if T_F = T_B = T_W; 2 p half-sized chunks are p M_B.
    schedule = build("zb-v", p, 2 * p + extra)
    assert idle_within(simulate(schedule)) == (0,) * p
    assert peak_in_flight(schedule) == (2 * p,) * p


@given(half=st.integers(1, 4), extra=st.integers(0, 6), costs=st.tuples(*[st.floats(0, 1)] * 3))
def test_dualpipe_idles_for_f_and_i_without_w_on_every_rank_before_the_middle(half, extra, costs):
    # W <= I <= F <= B = I + W, made from three shares.
    i = 1 + costs[0]
    w = i * (0.5 + costs[1] / 2)
    f = i + w * costs[2]
    schedule = build("dualpipe", 2 * half, 4 * half + 2 * extra)
    priced = {Kind.FORWARD: f, Kind.INPUT_GRAD: i, Kind.WEIGHT_GRAD: w}
    bubble = max(idle_within(simulate(schedule, priced)))
    assert bubble == pytest.approx((half - 1) * (f + i - w), abs=1e-9)
    # DeepSeek-V3 (arXiv:2412.19437), table 2: PP + 1 micro-batches.
    assert peak_in_flight(schedule) == (2 * half + 1,) * (2 * half)


@given(p=ranks, m=micro_batches)
def test_1f1b_idles_for_a_forward_and_a_backward_per_rank_behind(p, m):
    assert idle_within(simulate(build("1f1b", p, m))) == tuple(3 * (p - 1 - r) for r in range(p))


@given(p=ranks, m=micro_batches)
def test_1f1b_holds_as_many_micro_batches_as_there_are_ranks_behind(p, m):
    assert peak_in_flight(build("1f1b", p, m)) == tuple(min(p - r, m) for r in range(p))


@given(p=ranks, m=micro_batches)
def test_gpipe_holds_all_micro_batches(p, m):
    assert peak_in_flight(build("gpipe", p, m)) == (m,) * p


@given(p=st.integers(2, 8), rounds=st.integers(1, 4), v=st.integers(2, 4))
def test_interleaving_holds_the_warm_up_and_one_more_chunk(p, rounds, v):
    m = p * rounds
    held = [min((v - 1) * p + 2 * (p - 1 - r) + 1, v * m) for r in range(p)]
    assert list(peak_in_flight(build("interleaved", p, m, v))) == held
    # Korthikanti et al. 2022, section 4.2.3: the first rank holds 1 + (p - 1) / (p v) of L layers.
    if m > p:
        assert held[0] / v / p == pytest.approx(1 + (p - 1) / (p * v))


@given(p=ranks, rounds=st.integers(1, 4), v=st.integers(1, 3))
def test_an_evaluation_only_fills_the_pipeline_and_drains_it(p, rounds, v):
    m = p * rounds
    found = occupancy(simulate(forward_only(p, m, v)))
    assert found.makespan == v * m + p - 1


@pytest.mark.parametrize(
    ("p", "m", "overhead", "idle"),
    [(8, 8, 0.875, 0.467), (8, 32, 0.219, 0.179), (8, 64, 0.109, 0.099), (16, 64, 0.234, 0.190)],
)
def test_the_published_table_of_bubbles_comes_out_of_the_simulation(p, m, overhead, idle):
    found = occupancy(simulate(build("1f1b", p, m)))
    assert found.bubble_over_ideal == pytest.approx(overhead, abs=5e-4)
    assert found.idle_fraction == pytest.approx(idle, abs=5e-4)


def test_sixteen_ranks_with_eight_chunks_idle_for_15_of_256():
    found = occupancy(simulate(build("interleaved", 16, 32, 8)))
    assert found.bubble_over_ideal == pytest.approx(15 / 256)


def test_messages_and_reductions_in_the_rows_take_no_time():
    assert simulate(lowered(Layout(pp=3), 5, reduce_every=True)) == simulate(build("1f1b", 3, 5))


def test_a_hop_delays_only_what_crosses_ranks():
    vee = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", "vee")
    assert occupancy(simulate(vee)).makespan == 12
    assert occupancy(simulate(vee, hop=0.5)).makespan == 14


def test_a_whole_backward_without_a_cost_lasts_as_long_as_its_halves():
    halves = {Kind.FORWARD: 1.0, Kind.INPUT_GRAD: [2.0, 4.0], Kind.WEIGHT_GRAD: 3.0}
    spans = simulate(build("1f1b", 2, 1), halves).spans
    assert spans == (
        Span(0, "0F0", "compute", 0.0, 1.0),
        Span(0, "0B0", "compute", 9.0, 14.0),
        Span(1, "1F0", "compute", 1.0, 2.0),
        Span(1, "1B0", "compute", 2.0, 9.0),
    )


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({Kind.FORWARD: 1.0}, "no cost for B in 1f1b; give F, and B or I and W"),
        ({Kind.FORWARD: -1.0, Kind.BACKWARD: 1.0}, "cost of F is -1.0; it must be finite"),
        ({Kind.FORWARD: math.nan, Kind.BACKWARD: 1.0}, "cost of F is nan; it must be finite"),
        ({Kind.FORWARD: [1.0], Kind.BACKWARD: 1.0}, "1 costs of F for 2 stages; give one, or one"),
        ({Kind.FORWARD: 0.0, Kind.BACKWARD: 0.0}, "every action costs 0; give at least one"),
    ],
)
def test_costs_that_are_no_durations_are_wrong_usage(costs, message):
    with pytest.raises(UsageError, match=message):
        simulate(build("1f1b", 2, 2), costs)


def test_a_negative_hop_is_wrong_usage():
    with pytest.raises(UsageError, match="hop is -1; it must be finite and at least 0"):
        simulate(build("1f1b", 2, 2), hop=-1)


def test_rows_that_wait_for_ever_are_not_priced():
    with pytest.raises(ScheduleError, match="deadlock: rank 0 before 0B0"):
        simulate(from_csv("0B0,0F0\n", "turned"))


def test_occupancy_reads_measured_timelines_too():
    measured = Timeline(
        "measured",
        (
            Span(0, "0F0", "compute", 10.0, 13.0),
            Span(0, "send", "communicate", 13.0, 99.0),
            Span(1, "1F0", "compute", 13.0, 14.0),
        ),
    )
    assert occupancy(measured) == (4.0, 2.0, 1.0, 0.5)
