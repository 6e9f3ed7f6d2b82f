from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.schedule import Kind
from phalanx.schedules.check import check
from phalanx.schedules.one_f_one_b import ONE_F_ONE_B


def test_four_ranks_and_six_micro_batches_draw_the_figure_of_the_paper():
    rows = [" ".join(row) for row in ONE_F_ONE_B.build(4, 6).texts()]
    assert rows == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
    ]


def test_one_rank_alternates_from_the_start():
    assert ONE_F_ONE_B.build(1, 2).texts() == [["0F0", "0B0", "0F1", "0B1"]]


@given(p=st.integers(1, 8), m=st.integers(1, 20))
def test_any_sizes_are_complete_and_free_of_deadlock(p, m):
    check(ONE_F_ONE_B.build(p, m))


@given(p=st.integers(1, 8), m=st.integers(1, 20))
def test_gradients_are_summed_in_the_order_of_the_micro_batches(p, m):
    for row in ONE_F_ONE_B.build(p, m).rows:
        assert [a.microbatch for a in row if a.kind is Kind.BACKWARD] == list(range(m))
