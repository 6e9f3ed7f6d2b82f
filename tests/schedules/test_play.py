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


def _inputs(action: Action, schedule: Schedule) -> list[Action]:
    """Everything that could make what `action` waits for, written down from the definition."""
    stage, kind, i = action
    first, last = stage % schedule.depth == 0, (stage + 1) % schedule.depth == 0
    match kind:
        case Kind.FORWARD:
            return [] if first else [Action(stage - 1, kind, i)]
        case Kind.WEIGHT_GRAD:
            return [Action(stage, Kind.INPUT_GRAD, i)]
        case _:
            later = [Action(stage + 1, k, i) for k in (Kind.BACKWARD, Kind.INPUT_GRAD)]
            return [Action(stage, Kind.FORWARD, i), *([] if last else later)]


@given(schedule=schedules(), f=seconds, b=seconds, w=seconds, hop=seconds)
def test_an_action_starts_exactly_when_its_rank_is_free_and_its_inputs_are_there(
    schedule, f, b, w, hop
):
    cost = {Kind.FORWARD: f, Kind.BACKWARD: b + w, Kind.INPUT_GRAD: b, Kind.WEIGHT_GRAD: w}
    at = _at(schedule, play(schedule, cost, hop))
    for rank, row in enumerate(schedule.rows):
        free = 0.0
        for action in row:
            ready = [free]
            for made in _inputs(action, schedule):
                if made in at:
                    away = hop if schedule.ranks[made.stage] != rank else 0.0
                    ready.append(at[made] + cost[made.kind] + away)
            assert at[action] == max(ready)
            free = at[action] + cost[action.kind]


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
