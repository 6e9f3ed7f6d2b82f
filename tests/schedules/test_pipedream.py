from hypothesis import given
from hypothesis import strategies as st

from phalanx.schedules.one_f_one_b import ONE_F_ONE_B
from phalanx.schedules.pipedream import PIPEDREAM, stashed_weights, weight_delays


@given(p=st.integers(1, 8), m=st.integers(1, 30))
def test_a_run_without_flushes_is_one_long_1f1b(p, m):
    assert PIPEDREAM.build(p, m).rows == ONE_F_ONE_B.build(p, m).rows


@given(p=st.integers(1, 8), m=st.integers(1, 30))
def test_weights_are_at_most_as_old_as_there_are_ranks_behind(p, m):
    for rank, row in enumerate(PIPEDREAM.build(p, m).rows):
        assert weight_delays(row) == tuple(min(i, p - 1 - rank) for i in range(m))


@given(p=st.integers(1, 8), extra=st.integers(0, 20))
def test_a_rank_stashes_one_version_for_every_rank_from_itself_on(p, extra):
    rows = PIPEDREAM.build(p, 2 * p - 1 + extra).rows
    assert [stashed_weights(row) for row in rows] == [p - rank for rank in range(p)]


@given(p=st.integers(1, 8), m=st.integers(1, 30))
def test_short_runs_stash_no_more(p, m):
    for rank, row in enumerate(PIPEDREAM.build(p, m).rows):
        assert 1 <= stashed_weights(row) <= min(p - rank, m)
