"""The papers' activation formulas as functions of layout and shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.activations import checkpointed_bytes, linear_term_bytes, paper_layer_bytes

SHAPE = ModelShape(hidden=1024, heads=16)
tps = st.sampled_from([1, 2, 4, 8])
seqs = st.integers(1, 64).map(lambda n: 128 * n)


@given(tps, seqs)
def test_sequence_parallelism_divides_everything_by_t(t: int, seq: int):
    whole = paper_layer_bytes(SHAPE, Layout(), seq)
    assert paper_layer_bytes(SHAPE, Layout(tp=t), seq) == pytest.approx(whole / t)


@given(tps, seqs)
def test_each_row_of_the_table_keeps_less_than_the_one_above(t: int, seq: int):
    rows = [
        Layout(tp=t, sp=False),
        Layout(tp=t),
        Layout(tp=t, recompute="selective"),
        Layout(tp=t, recompute="full"),
    ]
    kept = [paper_layer_bytes(SHAPE, row, seq) for row in rows]
    assert kept == sorted(kept, reverse=True)


def test_without_cuts_the_two_terms_are_34_and_5_a_s_over_h():
    s, h, a = 2048, SHAPE.hidden, SHAPE.heads
    assert paper_layer_bytes(SHAPE, Layout(mb=3), s) == s * 3 * h * (34 + 5 * a * s / h)


def test_checkpointing_keeps_inputs_and_one_whole_block():
    kept = checkpointed_bytes(SHAPE, tokens=100, layers=10, t=1)
    assert kept == 100 * 10 * 2 * 1024 + linear_term_bytes(SHAPE, 100, 1, 1)
