import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RefusedError
from phalanx.schedules.check import check
from phalanx.schedules.interleaved import INTERLEAVED


def test_two_ranks_with_two_chunks_each_alternate_between_them():
    rows = [" ".join(row) for row in INTERLEAVED.build(2, 4, 2).texts()]
    assert rows == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@given(p=st.integers(2, 6), rounds=st.integers(1, 4), v=st.integers(2, 4))
def test_any_sizes_that_divide_are_complete_and_free_of_deadlock(p, rounds, v):
    schedule = INTERLEAVED.build(p, p * rounds, v)
    check(schedule)
    assert [schedule.stages_of(r) for r in range(p)] == [
        tuple(r + p * chunk for chunk in range(v)) for r in range(p)
    ]


@pytest.mark.parametrize(
    ("p", "m", "v", "works"),
    [
        (4, 6, 2, "m can be 4 or 8"),
        (4, 3, 2, "m can be 4"),
        (1, 4, 2, "p to be at least 2, not p=1; p can be 2"),
        (4, 8, 1, "v to be at least 2, not v=1; v can be 2"),
    ],
)
def test_sizes_that_cannot_be_interleaved_are_refused_with_what_works(p, m, v, works):
    with pytest.raises(RefusedError, match=f"{works}.*$"):
        INTERLEAVED.build(p, m, v)
