from dataclasses import replace

import pytest
from drawn_sizes import WHOLE_BACKWARDS, schedules
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Action, Kind, Row, Schedule
from phalanx.schedules.build import build, forward_only
from phalanx.schedules.check import check
from phalanx.schedules.text import from_csv


def with_row(schedule: Schedule, rank: int, row: Row) -> Schedule:
    rows = schedule.rows
    return replace(schedule, rows=(*rows[:rank], row, *rows[rank + 1 :]))


@given(schedule=schedules())
def test_what_the_generators_write_is_accepted(schedule):
    check(schedule)


@given(schedule=schedules(WHOLE_BACKWARDS), data=st.data())
def test_a_missing_action_is_caught_by_name(schedule, data):
    rank = data.draw(st.integers(0, schedule.p - 1))
    place = data.draw(st.integers(0, len(schedule.rows[rank]) - 1))
    row = schedule.rows[rank]
    stage, kind, i = row[place]
    found = (
        f"does {stage}B{i} before all else" if kind is Kind.FORWARD else f"never does {stage}B{i}"
    )
    with pytest.raises(ScheduleError, match=f"rank {rank} {found}"):
        check(with_row(schedule, rank, row[:place] + row[place + 1 :]))


@given(schedule=schedules(), data=st.data())
def test_a_duplicated_action_is_caught_by_name(schedule, data):
    rank = data.draw(st.integers(0, schedule.p - 1))
    row = schedule.rows[rank]
    action = data.draw(st.sampled_from(row))
    place = data.draw(st.integers(0, len(row)))
    with pytest.raises(ScheduleError, match=f"rank {rank} does {action.stage}"):
        check(with_row(schedule, rank, (*row[:place], action, *row[place:])))


@given(schedule=schedules(WHOLE_BACKWARDS), data=st.data())
def test_a_backward_before_its_own_forward_is_caught(schedule, data):
    rank = data.draw(st.integers(0, schedule.p - 1))
    forward = data.draw(st.sampled_from([a for a in schedule.rows[rank] if a.kind is Kind.FORWARD]))
    backward = forward._replace(kind=Kind.BACKWARD)
    swap = {forward: backward, backward: forward}
    row = tuple(swap.get(action, action) for action in schedule.rows[rank])
    with pytest.raises(
        ScheduleError, match=f"{backward} before all else on stage .*after its forw"
    ):
        check(with_row(schedule, rank, row))


@given(schedule=schedules(), data=st.data())
def test_a_reversed_row_is_caught(schedule, data):
    rank = data.draw(st.integers(0, schedule.p - 1))
    with pytest.raises(ScheduleError, match=f"rank {rank} does"):
        check(with_row(schedule, rank, schedule.rows[rank][::-1]))


@given(schedule=schedules(), data=st.data())
def test_any_missing_action_is_caught(schedule, data):
    rank = data.draw(st.integers(0, schedule.p - 1))
    place = data.draw(st.integers(0, len(schedule.rows[rank]) - 1))
    row = schedule.rows[rank]
    with pytest.raises(ScheduleError, match=f"rank {rank} (never )?does {row[place].stage}[BIW]"):
        check(with_row(schedule, rank, row[:place] + row[place + 1 :]))


@given(p=st.integers(2, 5), m=st.integers(1, 6), data=st.data())
def test_an_action_on_the_wrong_rank_is_sent_where_it_belongs(p, m, data):
    schedule = build("1f1b", p, m)
    rank = data.draw(st.integers(0, p - 1))
    wrong = data.draw(st.integers(0, p - 1).filter(lambda r: r != rank))
    action = data.draw(st.sampled_from(schedule.rows[rank]))
    moved = with_row(schedule, wrong, (*schedule.rows[wrong], action))
    with pytest.raises(ScheduleError, match=f"rank {wrong} does {action}, .* to rank {rank}"):
        check(moved)


def test_rows_that_wait_for_each_other_are_a_deadlock():
    # Each row is fine alone; rank 0 wants gradient 1 before it has sent what rank 1 starts with.
    schedule = from_csv("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n", "legal")
    check(schedule)
    crossed = from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "crossed")
    with pytest.raises(ScheduleError, match="deadlock: rank 0 before 0B0, rank 1 before 1F1"):
        check(crossed)


def test_split_backwards_need_both_halves_in_order():
    check(from_csv("0F0,0I0,0W0\n1F0,1B0\n", "mixed"))
    with pytest.raises(ScheduleError, match="rank 0 never does 0W0"):
        check(from_csv("0F0,0I0\n", "half"))
    with pytest.raises(ScheduleError, match=r"0W0 after its forward.*after its input gradient"):
        check(from_csv("0F0,0W0,0I0\n", "turned"))
    with pytest.raises(ScheduleError, match="0B0 after its input gradient"):
        check(from_csv("0F0,0I0,0B0\n", "both"))


def test_an_evaluation_has_no_backwards():
    check(forward_only(3, 4), trains=False)
    with pytest.raises(ScheduleError, match=r"rank 0 goes backward .*forwards only"):
        check(build("1f1b", 2, 2), trains=False)


@pytest.mark.parametrize(
    ("action", "works"),
    [
        (Action(2, Kind.FORWARD, 0), "stages go from 0 to 1"),
        (Action(-1, Kind.FORWARD, 0), "stages go from 0 to 1"),
        (Action(0, Kind.FORWARD, 5), "micro-batches of stage 0 go from 0 to 4"),
    ],
)
def test_a_stage_or_micro_batch_that_does_not_exist_is_caught(action, works):
    schedule = build("1f1b", 2, 5)
    with pytest.raises(ScheduleError, match=works):
        check(with_row(schedule, 0, (action, *schedule.rows[0])))
