"""The wall clock of a run: every second has one name, over restarts, stops and rollbacks."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import read_lines, write_lines

from phalanx.reports.record import EventRecord, RunRecord, StepRecord, read_run
from phalanx.reports.wall import (
    BACK,
    ENDING,
    STARTING,
    STEPS,
    UNEXPLAINED,
    wall_clock,
)
from phalanx.trainer.run.goodput import REPEATED, RESTARTING, SKIPPED, VALIDATION, goodput


def step(number: int, time: float, seconds: float = 1.0, **rest: Any) -> StepRecord:
    missing = dict.fromkeys(StepRecord._fields)
    return StepRecord(
        **missing | {"step": number, "time": time, "seconds": seconds, "skipped": False} | rest
    )


def event(time: float, kind: str) -> EventRecord:
    return EventRecord(time, kind, None, None, kind)


def record(steps: list[StepRecord], events: list[EventRecord]) -> RunRecord:
    return RunRecord(Path("x"), {}, None, {}, tuple(steps), (), tuple(events), {}, False)


def spent(steps: list[StepRecord], events: list[EventRecord]) -> dict[str, float]:
    found = wall_clock(record(steps, events))
    assert math.fsum(term.measured for term in found.terms) == pytest.approx(found.seconds)
    return {term.name: term.measured for term in found.terms} | {"stopped": found.stopped}


def test_a_restart_is_what_lies_between_the_steps_that_count():
    steps = [step(1, 11.0), step(2, 12.0), step(3, 33.0)]
    events = [event(10.0, "start"), event(20.0, "restart"), event(31.5, "start")]
    found = spent(steps, events)
    assert found == {STEPS: 3.0, REPEATED: 8.0, RESTARTING: 12.0, "stopped": 0.0}


def test_of_two_failures_in_a_row_each_cost_what_it_did():
    steps = [step(1, 11.0), step(2, 41.0)]
    kinds = [(10, "start"), (14, "restart"), (20, "start"), (25, "restart"), (38, "start")]
    found = spent(steps, [event(*each) for each in kinds])
    assert found == {STEPS: 2.0, REPEATED: 3.0 + 5.0, RESTARTING: 6.0 + 13.0 + 2.0, "stopped": 0.0}


def test_time_in_which_a_run_was_stopped_is_not_its_wall_clock():
    steps = [step(1, 11.0), step(2, 103.0)]
    events = [
        event(10.0, "start"),
        event(12.0, "stop"),
        event(101.0, "start"),
        event(104.0, "stop"),
    ]
    found = spent(steps, events)
    assert found == {STEPS: 2.0, STARTING: 1.0, ENDING: 2.0, "stopped": 89.0}


def test_time_after_a_launcher_was_killed_belongs_to_whoever_starts_it_again():
    steps = [step(1, 11.0), step(2, 53.0)]
    found = spent(steps, [event(10.0, "start"), event(50.0, "start")])
    assert found == {STEPS: 2.0, STARTING: 2.0, "stopped": 39.0}


@pytest.mark.parametrize(
    ("steps", "events"),
    [
        ([step(1, 11.0), step(2, 12.0)], [(10.0, "start"), (13.0, "stop")]),
        ([step(1, 11.0), step(2, 33.0)], [(10.0, "start"), (20.0, "restart"), (31.5, "start")]),
        ([step(1, 11.0), step(2, 53.0)], [(10.0, "start"), (50.0, "start")]),
        (
            [step(1, 11.0, skipped=True), step(2, 103.0, validation_seconds=0.5)],
            [(10.0, "start"), (12.0, "stop"), (101.0, "start"), (104.0, "stop")],
        ),
    ],
    ids=["plain", "restarted", "launcher killed", "stopped"],
)
def test_goodput_is_what_the_trainer_says(steps: list[StepRecord], events: list[tuple[float, str]]):
    found = wall_clock(record(steps, [event(*each) for each in events]))
    told = [{"time": time, "kind": kind} for time, kind in events]
    ended = max([each.time for each in steps] + [time for time, _ in events])
    theirs = goodput(told, [each._asdict() for each in steps], ended)
    assert found.goodput == pytest.approx(theirs.share)
    assert found.seconds == pytest.approx(theirs.wall)


def test_a_rollback_a_validation_and_a_skipped_step_have_names():
    steps = [
        step(1, 11.0, validation_seconds=2.0),
        step(2, 14.0, skipped=True),
        step(3, 20.0),
    ]
    found = spent(steps, [event(10.0, "start"), event(16.0, "spike")])
    assert found == {STEPS: 2.0, SKIPPED: 1.0, VALIDATION: 2.0, BACK: 5.0, "stopped": 0.0}


def test_what_nothing_explains_is_called_so():
    assert spent([step(1, 1.0), step(2, 5.0)], [])[UNEXPLAINED] == 3.0


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10), st.booleans()), min_size=1, max_size=9),
    st.lists(
        st.tuples(
            st.floats(0, 120), st.sampled_from(["start", "stop", "restart", "resume", "note"])
        ),
        max_size=6,
    ),
)
def test_terms_add_up_whatever_the_clocks_say(
    steps: list[tuple[float, float, bool]], events: list[tuple[float, str]]
):
    written = [step(i, time, s, skipped=skip) for i, (time, s, skip) in enumerate(steps, 1)]
    found = spent(written, sorted(event(*each) for each in events))
    assert all(seconds >= 0 for seconds in found.values())


def test_steps_without_times_have_no_wall_clock(copied: Path):
    lines = read_lines(copied / "metrics.jsonl")
    write_lines(copied / "metrics.jsonl", [{**line, "time": None} for line in lines])
    assert wall_clock(read_run(copied)) is None
