"""Checkpoints and failures: the optimum is one, and chance agrees with the formula."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.cost.reliability import Faults, between_failures, daly_interval, effective_share


def played_share(interval: float, write: float, faults: Faults, segments: int) -> float:
    """Train `segments` intervals while failures strike at random; useful over wall time."""
    chance = random.Random(7)
    clock = 0.0
    for _ in range(segments):
        while (strike := chance.expovariate(1 / faults.between)) < interval + write:
            clock += strike
            while (again := chance.expovariate(1 / faults.between)) < faults.restart:
                clock += again
            clock += faults.restart
        clock += interval + write
    return segments * interval / clock


@pytest.mark.parametrize("interval", [600.0, 1800.0, 7200.0])
def test_failures_drawn_at_random_leave_the_share_of_the_formula(interval: float):
    faults = Faults(between=11_000, restart=300)
    played = played_share(interval, 20.0, faults, segments=20_000)
    assert effective_share(interval, 20.0, faults) == pytest.approx(played, rel=0.01)


@given(st.floats(0.5, 300), st.floats(3600, 1e6), st.floats(0, 3600), st.floats(0.1, 10))
def test_no_interval_is_better_than_dalys(write: float, M: float, R: float, factor: float):
    faults = Faults(M, R)
    best = effective_share(daly_interval(write, M), write, faults)
    other = effective_share(factor * daly_interval(write, M), write, faults)
    assert other <= best * (1 + 1e-4)


def test_a_checkpoint_slower_than_two_failures_is_written_once_between_them():
    assert daly_interval(3000, 1000) == 1000


@given(st.floats(1, 1e5), st.floats(0, 100), st.floats(100, 1e7), st.floats(0, 1e4))
def test_a_share_is_a_share(interval: float, write: float, M: float, R: float):
    assert 0 <= effective_share(interval, write, Faults(M, R)) <= 1


def test_without_failures_only_writing_costs():
    assert effective_share(1800, 200, Faults(inf, 0)) == pytest.approx(0.9)


def test_twice_the_devices_fail_twice_as_often():
    assert between_failures(32768, 16384, 11_135) == pytest.approx(11_135 / 2)


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(UsageError, match="must be positive"):
        effective_share(0, 1, Faults(1, 1))
