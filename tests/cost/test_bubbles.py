"""Closed forms of pipeline bubbles, against schedules played action by action."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.schedule import Kind
from phalanx.cost.bubbles import FORMULAS, PassSeconds, bubble, peak_in_flight
from phalanx.schedules.build import build
from phalanx.schedules.play import play

ranks = st.integers(1, 8)
seconds = st.floats(0.1, 10)


@given(ranks, st.integers(1, 16), seconds, seconds, seconds)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_played_schedule_idles_as_long_as_the_formula(
    name: str, p: int, m: int, f: float, i: float, w: float
):
    times = PassSeconds(f, i, w)
    costs = {Kind.FORWARD: f, Kind.BACKWARD: times.B}
    schedule = build(name, p, m)
    starts = play(schedule, costs)
    end = max(row[-1] for row in starts) + times.B
    expected = bubble(name, p, m, times)
    assert end == pytest.approx(expected.idle + expected.work)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_a_played_interleaved_schedule_idles_as_long_as_the_formula(p: int, rounds: int, v: int):
    m = p * rounds
    times = PassSeconds()
    schedule = build("interleaved", p, m, v)
    costs = {Kind.FORWARD: times.F / v, Kind.BACKWARD: times.B / v}
    end = max(row[-1] for row in play(schedule, costs)) + times.B / v
    expected = bubble("interleaved", p, m, times, v)
    assert end == pytest.approx(expected.idle + expected.work)


@given(ranks, st.integers(1, 64))
def test_the_two_forms_of_a_bubble_are_the_papers(p: int, m: int):
    idle = bubble("1f1b", p, m)
    assert idle.over_ideal == pytest.approx((p - 1) / m)
    assert idle.idle_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(2, 16), st.integers(1, 64), seconds, seconds, seconds)
def test_splitting_backward_never_costs_time(p: int, m: int, f: float, i: float, w: float):
    times = PassSeconds(f, i, w)
    idles = [bubble(name, p, m, times).idle for name in ("1f1b", "zb-h1", "zb-h2")]
    assert idles == sorted(idles, reverse=True)
    assert idles[-1] >= 0


@pytest.mark.parametrize("name", FORMULAS)
def test_two_ranks_or_more_have_a_formula_under_every_name(name: str):
    assert bubble(name, 4, 16, v=2).work == 48


def test_one_rank_never_idles():
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"):
        assert bubble(name, 1, 4).idle == 0


def test_held_micro_batches_of_interleaving_are_those_of_megatrons_warm_up():
    # p=4, v=2, rank 0: 2 x 3 + 1 x 4 + 1 = 11 chunk passes of half a rank's layers.
    assert peak_in_flight("interleaved", 4, 16, 0, 2) == 11 / 2
    assert peak_in_flight("interleaved", 4, 4, 0, 2) == 8 / 2


def test_what_has_no_formula_is_refused_by_name():
    with pytest.raises(UsageError, match="no bubble formula"):
        bubble("looped", 4, 4)
    with pytest.raises(RefusedError, match="simulate it"):
        bubble("zb-v", 4, 4, PassSeconds(1, 2, 1))
    with pytest.raises(RefusedError, match="p=5, try 4 or 6"):
        bubble("dualpipe", 5, 10)
    with pytest.raises(UsageError, match="at least 1"):
        bubble("1f1b", 0, 1)
    with pytest.raises(UsageError, match="count the rows"):
        peak_in_flight("zb-h1", 4, 4)
