import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ScheduleError
from phalanx.core.layout import Layout
from phalanx.schedules.check import check
from phalanx.schedules.forward_only import forward_only
from phalanx.schedules.layouts import num_stages, placement
from phalanx.schedules.placement import looped


@given(p=st.integers(1, 6), m=st.integers(1, 13), v=st.integers(1, 4))
def test_any_sizes_pass_every_micro_batch_through_every_stage(p, m, v):
    check(forward_only(looped(p, v), m), trains=False)


def test_micro_batches_go_round_in_groups_as_wide_as_the_pipeline():
    assert forward_only(looped(2, 2), 3).texts() == [
        ["0F0", "0F1", "2F0", "2F1", "0F2", "2F2"],
        ["1F0", "1F1", "3F0", "3F1", "1F2", "3F2"],
    ]


def test_an_evaluation_is_no_training_step():
    with pytest.raises(ScheduleError, match="rank 0 never does 0B0"):
        check(forward_only(looped(2, 1), 2))


@pytest.mark.parametrize("name", ["zb-v", "dualpipe", "dualpipev"])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_an_evaluation_passes_one_copy_of_the_model_wherever_it_lies(name, m):
    layout = Layout(pp=4, schedule=name)
    schedule = forward_only(placement(layout), m)
    check(schedule, trains=False)
    assert schedule.num_stages == num_stages(layout)
