from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.schedule import Kind
from phalanx.schedules.check import check
from phalanx.schedules.gpipe import GPIPE


@given(p=st.integers(1, 8), m=st.integers(1, 20))
def test_every_rank_does_all_forwards_then_all_backwards(p, m):
    schedule = GPIPE.build(p, m)
    check(schedule)
    for row in schedule.rows:
        assert [action.kind for action in row] == [Kind.FORWARD] * m + [Kind.BACKWARD] * m


def test_one_rank_is_a_pipeline_of_length_one():
    assert GPIPE.build(1, 3).texts() == [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]]
