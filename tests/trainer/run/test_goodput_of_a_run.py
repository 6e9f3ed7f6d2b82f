"""Every second of a run is training, or lost to something that has a name."""

from typing import Any

import pytest

from phalanx.trainer.run.goodput import goodput


def event(time: float, kind: str) -> dict[str, Any]:
    return {"time": time, "kind": kind}


def step(time: float, seconds: float = 1.0, validation: float | None = None) -> dict[str, Any]:
    return {"time": time, "seconds": seconds, "validation_seconds": validation}


def test_an_undisturbed_run_loses_what_lies_between_its_steps() -> None:
    events = [event(100, "start"), event(110, "note"), event(112, "stop")]
    found = goodput(events, [step(101 + i) for i in range(8)], now=500)
    assert found.training == 8
    assert found.lost == {"saves and reports": 4}
    assert found.share == pytest.approx(8 / 12)


def test_steps_that_are_done_twice_are_lost_once_and_restarts_are_timed() -> None:
    events = [event(100, "start"), event(110, "restart"), event(113, "start"), event(120, "stop")]
    kept = [*(step(101 + i) for i in range(4)), *(step(114 + i) for i in range(7))]
    found = goodput(events, kept, now=500)
    assert found.training == 11
    assert found.lost == {"restarting": 3, "steps done twice": 6}
    assert found.restarts == (3,)
    assert found.wall == 20


def test_a_start_that_fails_at_once_is_part_of_the_restart() -> None:
    events = [event(100, "start"), event(104, "restart"), event(106, "restart")]
    found = goodput([*events, event(109, "start"), event(111, "stop")], [step(111, 2)], now=500)
    assert found.restarts == (5,)
    assert found.lost == {"restarting": 5, "steps done twice": 4}


def test_time_between_a_stop_and_the_next_start_belongs_to_nobody() -> None:
    events = [event(100, "start"), event(102, "stop"), event(9000, "start")]
    found = goodput(events, [step(102, 2), step(9003, 2, validation=0.5)], now=9003)
    assert found.training == 4
    assert found.lost == {"validation": 0.5, "saves and reports": 0.5}


def test_a_launcher_that_was_killed_leaves_its_last_step() -> None:
    events = [event(100, "start"), event(900, "start")]
    found = goodput(events, [step(101), step(102), step(901)], now=901)
    assert (found.training, found.wall) == (3, 3)


def test_before_the_first_step_there_is_no_share() -> None:
    assert goodput([], [], now=5).share is None
