"""Bytes per parameter under ZeRO."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.cost.state import (
    FULL_FP32_ADAM,
    MIXED_ADAM,
    MIXED_ADAM_FP32_GRADIENTS,
    StateBytes,
    largest_model,
    sharded,
)

degrees = st.integers(1, 10**6)


@given(degrees)
def test_the_stages_are_the_papers_closed_forms(d: int):
    totals = [sharded(MIXED_ADAM, zero, d).total for zero in range(4)]
    assert totals == pytest.approx([16, 4 + 12 / d, 2 + 14 / d, 16 / d])


@given(degrees, st.builds(StateBytes, *[st.floats(0, 16)] * 4))
def test_every_stage_keeps_at_most_what_the_one_before_keeps(d: int, state: StateBytes):
    totals = [sharded(state, zero, d).total for zero in range(4)]
    assert totals == sorted(totals, reverse=True)


@given(st.integers(0, 3))
def test_one_rank_has_nothing_to_share(zero: int):
    assert sharded(MIXED_ADAM, zero, 1) == MIXED_ADAM


def test_fp32_gradients_cost_two_bytes_more_and_pure_fp32_needs_no_master():
    assert MIXED_ADAM_FP32_GRADIENTS.total == 18
    assert FULL_FP32_ADAM.total == 16


def test_the_largest_model_fills_the_memory():
    assert largest_model(80e9) * MIXED_ADAM.total == 80e9


@pytest.mark.parametrize(("zero", "d"), [(4, 2), (-1, 2), (1, 0)])
def test_a_stage_that_does_not_exist_is_refused(zero: int, d: int):
    with pytest.raises(UsageError, match="zero can be"):
        sharded(MIXED_ADAM, zero, d)
