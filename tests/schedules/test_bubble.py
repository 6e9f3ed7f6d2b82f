"""Closed forms of pipeline bubbles, against schedules played action by action."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.schedule import Kind
from phalanx.schedules.bubble import PassSeconds
from phalanx.schedules.build import build
from phalanx.schedules.play import play
from phalanx.schedules.registry import SPECS, find_schedule
from phalanx.schedules.spec import ScheduleSpec

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
    expected = find_schedule(name).bubble_of(p, m, times)
    assert end == pytest.approx(expected.idle + expected.work)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_a_played_interleaved_schedule_idles_as_long_as_the_formula(p: int, rounds: int, v: int):
    m = p * rounds
    times = PassSeconds()
    schedule = build("interleaved", p, m, v)
    costs = {Kind.FORWARD: times.F / v, Kind.BACKWARD: times.B / v}
    end = max(row[-1] for row in play(schedule, costs)) + times.B / v
    expected = find_schedule("interleaved").bubble_of(p, m, times, v)
    assert end == pytest.approx(expected.idle + expected.work)


@given(ranks, st.integers(1, 64))
def test_the_two_forms_of_a_bubble_are_the_papers(p: int, m: int):
    idle = find_schedule("1f1b").bubble_of(p, m)
    assert idle.over_ideal == pytest.approx((p - 1) / m)
    assert idle.idle_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(2, 16), st.integers(1, 64), seconds, seconds, seconds)
def test_splitting_backward_never_costs_time(p: int, m: int, f: float, i: float, w: float):
    times = PassSeconds(f, i, w)
    idles = [find_schedule(n).bubble_of(p, m, times).idle for n in ("1f1b", "zb-h1", "zb-h2")]
    assert idles == sorted(idles, reverse=True)
    assert idles[-1] >= 0


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if spec.bubble], ids=lambda spec: spec.name
)
def test_whatever_the_idle_time_the_work_is_that_of_all_micro_batches(spec: ScheduleSpec):
    assert spec.bubble_of(4, 16).work == 48


def test_one_rank_never_idles():
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert find_schedule(name).bubble_of(1, 4).idle == 0


def test_held_micro_batches_of_interleaving_are_those_of_megatrons_warm_up():
    # p=4, v=2, rank 0: 2 x 3 + 1 x 4 + 1 = 11 chunk passes of half a rank's layers.
    assert find_schedule("interleaved").peak_in_flight(4, 16, 2)[0] == 11
    assert find_schedule("interleaved").peak_in_flight(4, 4, 2)[0] == 8


def test_what_has_no_formula_is_refused_by_name():
    with pytest.raises(RefusedError, match="no paper has a bubble formula for pipedream"):
        find_schedule("pipedream").bubble_of(4, 4)
    with pytest.raises(RefusedError, match="simulate it"):
        find_schedule("zb-v").bubble_of(4, 4, PassSeconds(1, 2, 1))
    with pytest.raises(RefusedError, match="p can be 4 or 6"):
        find_schedule("dualpipe").bubble_of(5, 10)
    with pytest.raises(UsageError, match="at least 1"):
        find_schedule("1f1b").bubble_of(0, 1)
