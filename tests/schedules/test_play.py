from dataclasses import replace

import pytest
from drawn_sizes import schedules
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.schedules.build import build
from phalanx.schedules.play import play
from phalanx.schedules.text import from_csv

seconds = st.floats(0, 10)


def _at(schedule: Schedule, starts: list[list[float]]) -> dict[Action, float]:
    return {
        action: start
        for row, begun in zip(schedule.rows, starts, strict=True)
        for action, start in zip(row, begun, strict=True)
    }


@given(schedule=schedules(), f=seconds, b=seconds, hop=seconds)
def test_an_action_starts_exactly_when_its_rank_is_free_and_its_inputs_are_there(
    schedule, f, b, hop
):
    cost = {Kind.FORWARD: f, Kind.BACKWARD: b}
    starts = play(schedule, cost, hop)
    at = _at(schedule, starts)
    last = schedule.num_stages - 1
    for rank, row in enumerate(schedule.rows):
        free = 0.0
        for action in row:
            stage, kind, i = action
            ready = [free]
            if kind is Kind.FORWARD and stage > 0:
                delay = hop if schedule.ranks[stage - 1] != rank else 0
                ready.append(at[Action(stage - 1, kind, i)] + f + delay)
            if kind is Kind.BACKWARD and stage < last:
                delay = hop if schedule.ranks[stage + 1] != rank else 0
                ready.append(at[Action(stage + 1, kind, i)] + b + delay)
            assert at[action] == max(ready)
            free = at[action] + cost[kind]


def test_costs_can_differ_between_stages():
    starts = play(build("1f1b", 2, 1), {Kind.FORWARD: [1, 10], Kind.BACKWARD: [3, 30]})
    assert starts == [[0, 41], [1, 11]]


def test_the_weight_gradient_waits_for_the_input_gradient_of_its_own_stage():
    halves = from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n", "halves")
    assert play(halves) == [[0, 3, 4], [1, 2, 3]]


def test_a_deadlock_names_the_ranks_and_what_they_wait_for():
    schedule = build("1f1b", 2, 2)
    reversed_first = replace(schedule, rows=(schedule.rows[0][::-1], schedule.rows[1]))
    with pytest.raises(ScheduleError, match="deadlock: rank 0 before 0B1, rank 1 before 1F0"):
        play(reversed_first)
