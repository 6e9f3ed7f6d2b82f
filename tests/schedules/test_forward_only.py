import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ScheduleError
from phalanx.schedules.check import check
from phalanx.schedules.forward_only import forward_only


@given(p=st.integers(1, 6), m=st.integers(1, 13), v=st.integers(1, 4))
def test_any_sizes_pass_every_micro_batch_through_every_stage(p, m, v):
    check(forward_only(p, m, v), trains=False)


def test_micro_batches_go_round_in_groups_as_wide_as_the_pipeline():
    assert forward_only(2, 3, 2).texts() == [
        ["0F0", "0F1", "2F0", "2F1", "0F2", "2F2"],
        ["1F0", "1F1", "3F0", "3F1", "1F2", "3F2"],
    ]


def test_an_evaluation_is_no_training_step():
    with pytest.raises(ScheduleError, match="rank 0 never does 0B0"):
        check(forward_only(2, 2, 1))
