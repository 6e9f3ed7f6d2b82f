"""A beat says what a rank is doing, and costs next to nothing."""

import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.trainer.run.heartbeat import SLOW_SECONDS, Heartbeat, read_pulse


@pytest.fixture
def heart(tmp_path: Path) -> Iterator[Heartbeat]:
    heart = Heartbeat(tmp_path, 3)
    yield heart
    heart.close()


def test_a_rank_says_what_it_does_and_what_it_waits_for(heart: Heartbeat, tmp_path: Path) -> None:
    assert read_pulse(tmp_path, 2) is None
    heart.step(12, 0.2)
    heart.doing("0F3")
    heart.waits("tensor", "activations")
    pulse = read_pulse(tmp_path, 3)
    assert pulse is not None
    assert (pulse.rank, pulse.step, pulse.phase, pulse.doing) == (3, 12, "train", "0F3")
    assert pulse.message == "'activations' along tensor"
    heart.arrived()
    later = read_pulse(tmp_path, 3)
    assert later is not None
    assert later.message == ""
    assert later.beats > pulse.beats


@pytest.mark.parametrize(("median", "limit"), [(0.0, SLOW_SECONDS), (0.01, 5.0), (4.0, 20.0)])
def test_a_rank_is_overdue_after_five_steps_of_its_own_and_five_seconds(
    heart: Heartbeat, tmp_path: Path, median: float, limit: float
) -> None:
    heart.step(2, median)
    pulse = read_pulse(tmp_path, 3)
    assert pulse is not None
    assert pulse.limit == limit


def test_slow_work_says_so_and_what_was_before_goes_on_after_it(
    heart: Heartbeat, tmp_path: Path
) -> None:
    heart.step(2, 0.01)
    before = heart.phase("checkpoints", SLOW_SECONDS)
    pulse = read_pulse(tmp_path, 3)
    assert pulse is not None
    assert (pulse.phase, pulse.limit) == ("checkpoints", SLOW_SECONDS)
    heart.phase(*before)
    pulse = read_pulse(tmp_path, 3)
    assert pulse is not None
    assert (pulse.phase, pulse.limit) == ("train", 5.0)


def test_a_beat_costs_some_microseconds_at_most(heart: Heartbeat) -> None:
    """A step of 100 ms with 100 actions and messages then pays less than 1 %."""
    times = timeit.repeat(lambda: heart.doing("0F3"), number=2000, repeat=7)
    assert min(times) / 2000 < 5e-6
