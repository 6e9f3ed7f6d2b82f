"""Bytes on each axis by the papers' formulas."""

import pytest
from formulas import elements_moved
from hypothesis import given
from hypothesis import strategies as st
from volumes import (
    context_layer_bytes,
    data_step_bytes,
    expert_layer_bytes,
    hidden_bytes,
    pipeline_boundary_bytes,
    tensor_layer_bytes,
)

from phalanx.core.layout import Coordinates, Layout
from phalanx.core.message import Axis, Message
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.cost.collectives import bytes_sent
from phalanx.cost.messages import rank_messages

SHAPE = ModelShape(hidden=1024, heads=16, kv_heads=4, layers=8)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 4))
def test_tp_sends_16_b_s_h_over_t_times_t_minus_one(t: int, b: int):
    sent = tensor_layer_bytes(SHAPE, Layout(tp=t, mb=b), 512)
    assert sent == 16 * b * 512 * 1024 * (t - 1) / t


def test_pp_sends_one_hidden_state_where_tp_sends_eight_times_as_much_per_layer():
    layout = Layout(tp=8, pp=2)
    ratio = tensor_layer_bytes(SHAPE, layout, 512) / pipeline_boundary_bytes(SHAPE, layout, 512)
    assert ratio == 8 * 7 / 8


@given(st.integers(0, 3), st.sampled_from([64, 1024]))
def test_dp_sends_what_the_zero_table_says_for_16_bit_gradients(zero: int, d: int):
    sent = data_step_bytes(1e6, Layout(dp=d, zero=zero))
    assert sent == pytest.approx(elements_moved(zero) * 2e6 * (d - 1) / d)


def test_fp32_gradients_double_the_half_that_reduces():
    half, full = (data_step_bytes(1e6, Layout(dp=1024), g) for g in (2.0, 4.0))
    assert full / half == pytest.approx(1.5)


def test_hybrid_sharding_reduces_only_its_own_part_across_copies():
    plain = data_step_bytes(1e6, Layout(dp=64, zero=3))
    hybrid = data_step_bytes(1e6, Layout(dp=64, shard=8, zero=3))
    within = 6e6 * 7 / 8
    across = 2 * 2e6 / 8 * 7 / 8
    assert hybrid == pytest.approx(within + across)
    assert across < plain / 10


def test_axes_of_one_send_nothing():
    layout = Layout()
    assert tensor_layer_bytes(SHAPE, layout, 512) == 0
    assert pipeline_boundary_bytes(SHAPE, layout, 512) == 0
    assert context_layer_bytes(SHAPE, layout, 512) == 0
    assert expert_layer_bytes(SHAPE, layout, 512) == 0
    assert data_step_bytes(1e6, layout) == 0


def test_a_ring_of_keys_and_values_grows_with_kv_heads_not_heads():
    many = ModelShape(hidden=1024, heads=16)
    layout = Layout(cp=4)
    ratio = context_layer_bytes(many, layout, 512) / context_layer_bytes(SHAPE, layout, 512)
    assert ratio == 4


def test_experts_on_other_ranks_cost_eight_crossings_per_choice():
    routed = ModelShape(hidden=1024, heads=16, experts=64, top_k=8)
    sent = expert_layer_bytes(routed, Layout(dp=64, ep=64), 512)
    assert sent == pytest.approx(4 * 2 * 8 * 512 * 1024 * 63 / 64)


# What the axes say that our own step sends, against the papers


def run_of(line: str, batch: int) -> Run:
    layout = Layout.parse(f"precision=bf16 {line}")
    return Run(model=SHAPE, layout=layout, recipe=Recipe(seq=512, batch=batch))


def sent_along(axis: Axis, run: Run) -> list[Message]:
    first = Coordinates(0, 0, 0, 0)
    return [message for message in rank_messages(run, first) if message.axis == axis]


@pytest.mark.parametrize("t", [2, 4])
def test_our_tensor_axis_sends_four_all_reduces_per_layer_and_one_at_each_end(t: int):
    run = run_of(f"tp={t} sp=off", batch=3)
    sent = sum(
        message.times * bytes_sent(message.collective, message.bytes, t)
        for message in sent_along("tensor", run)
        if not message.purpose.startswith("loss")
    )
    blocks = SHAPE.layers * tensor_layer_bytes(SHAPE, run.layout, 512)
    ends = 2 * bytes_sent("all_reduce", hidden_bytes(SHAPE, run.layout, 512), t)
    assert sent == pytest.approx(3 * (blocks + ends))


def test_with_sequence_parallelism_ours_gathers_inputs_once_more_in_backward():
    run = run_of("tp=4", batch=1)
    sent = sum(
        message.times * bytes_sent(message.collective, message.bytes, 4)
        for message in sent_along("tensor", run)
        if message.purpose.startswith("tp")
    )
    hidden = bytes_sent("all_gather", hidden_bytes(SHAPE, run.layout, 512), 4)
    paper = SHAPE.layers * tensor_layer_bytes(SHAPE, run.layout, 512)
    # Two more gathers per block; the embedding has two messages, the head three.
    assert sent == pytest.approx(paper + SHAPE.layers * 2 * hidden + 5 * hidden)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_our_data_axis_sends_what_the_paper_says_with_gradients_in_fp32(zero: int):
    run = run_of(f"dp=8 zero={zero}", batch=8)
    sent = sum(
        message.times * bytes_sent(message.collective, message.bytes, 8)
        for message in sent_along("data", run)
        if message.purpose != "valid tokens"
    )
    assert sent == pytest.approx(data_step_bytes(SHAPE.params(), run.layout, 4.0), rel=1e-4)


def test_our_pipeline_axis_sends_one_hidden_state_per_boundary_and_micro_batch():
    run = run_of("pp=2 tp=2", batch=6)
    (sent,) = sent_along("pipeline", run)
    whole = pipeline_boundary_bytes(SHAPE, run.layout, 512)
    assert (sent.bytes, sent.times) == (whole / 2, 6)  # sequence parallelism sends half each
