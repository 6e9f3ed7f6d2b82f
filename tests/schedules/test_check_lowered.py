from dataclasses import replace

import pytest
from drawn_sizes import schedules
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Kind, Row, Schedule
from phalanx.schedules.build import build
from phalanx.schedules.check_lowered import check_lowered
from phalanx.schedules.lower import add_reductions, add_transfers
from phalanx.schedules.messages import RECEIVES, SENDS, only_computing, other_end, peer
from phalanx.schedules.text import parse_action

MESSAGES = SENDS + RECEIVES


def with_row(schedule: Schedule, rank: int, row: Row) -> Schedule:
    rows = schedule.rows
    return replace(schedule, rows=(*rows[:rank], row, *rows[rank + 1 :]))


@st.composite
def places_of_messages(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A lowered schedule, and where one of its messages stands: rank and place."""
    lowered = add_transfers(draw(schedules()))
    places = [
        (rank, place)
        for rank, row in enumerate(lowered.rows)
        for place, action in enumerate(row)
        if action.kind in MESSAGES
    ]
    assume(places)
    return lowered, *draw(st.sampled_from(places))


@given(place=places_of_messages())
def test_a_missing_message_is_caught_by_name(place):
    schedule, rank, n = place
    row = schedule.rows[rank]
    with pytest.raises(ScheduleError, match=f"rank {rank} .*{row[n]}"):
        check_lowered(with_row(schedule, rank, row[:n] + row[n + 1 :]))


@given(place=places_of_messages(), data=st.data())
def test_a_duplicated_message_is_caught_by_name(place, data):
    schedule, rank, n = place
    row = schedule.rows[rank]
    second = data.draw(st.integers(0, len(row)))
    with pytest.raises(ScheduleError, match=f"rank {rank} .*{row[n]}"):
        check_lowered(with_row(schedule, rank, (*row[:second], row[n], *row[second:])))


@given(place=places_of_messages(), data=st.data())
def test_two_messages_with_one_peer_cannot_change_places_on_one_side_only(place, data):
    schedule, rank, n = place
    row = list(schedule.rows[rank])
    others = [
        k
        for k, action in enumerate(row)
        if k != n and action.kind in MESSAGES and peer(action, schedule) == peer(row[n], schedule)
    ]
    assume(others)
    k = data.draw(st.sampled_from(others))
    row[n], row[k] = row[k], row[n]
    with pytest.raises(ScheduleError, match=r"disagree|without|nothing is to be sent"):
        check_lowered(with_row(schedule, rank, tuple(row)))


def test_the_first_message_that_two_ranks_disagree_about_is_named():
    rows = list(add_transfers(build("1f1b", 2, 2)).rows)
    rows[1] = (rows[1][1], rows[1][0], *rows[1][2:])
    swapped = replace(build("1f1b", 2, 2), rows=tuple(rows))
    with pytest.raises(
        ScheduleError,
        match="ranks 0 and 1 disagree about message 0: 0SEND_F0 on rank 0, 1RECV_F1 on rank 1",
    ):
        check_lowered(swapped)


def test_pairs_that_agree_can_still_wait_in_a_ring_and_that_is_caught():
    # Stage 3 is back on rank 0, which does not receive before it has sent all three.
    texts = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 3RECV_F0 3F0 3RECV_F1 3F1 3RECV_F2 3F2",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2",
        "2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2",
    ]
    rows = tuple(tuple(map(parse_action, text.split())) for text in texts)
    ring = Schedule("ring", 3, 3, 2, rows, ranks=(0, 1, 2, 0))
    with pytest.raises(
        ScheduleError,
        match="wait for ever: rank 0 in 0SEND_F2, rank 1 in 1SEND_F1, rank 2 in 2SEND_F0",
    ):
        check_lowered(ring, trains=False)
    check_lowered(add_transfers(only_computing(ring)), trains=False)


@given(schedule=schedules(), data=st.data())
def test_a_stage_whose_last_gradients_are_not_reduced_is_caught(schedule, data):
    lowered = add_reductions(add_transfers(schedule), every=False)
    rank = data.draw(st.integers(0, schedule.p - 1))
    row = lowered.rows[rank]
    reduction = data.draw(st.sampled_from([a for a in row if a.kind is Kind.REDUCE]))
    without = tuple(action for action in row if action != reduction)
    late = (*without, reduction)
    early = (reduction, *without)
    message = f"rank {rank} does not reduce the last gradients of stage {reduction.stage}"
    with pytest.raises(ScheduleError, match=message):
        check_lowered(with_row(lowered, rank, late))
    if schedule.num_stages > 1:
        with pytest.raises(ScheduleError, match=message):
            check_lowered(with_row(lowered, rank, without))
    if schedule.m > 1:
        with pytest.raises(ScheduleError, match=message):
            check_lowered(with_row(lowered, rank, early))


@given(schedule=schedules())
def test_the_other_end_of_the_other_end_is_the_message_itself(schedule):
    lowered = add_transfers(schedule)
    for rank, row in enumerate(lowered.rows):
        for action in row:
            if action.kind in MESSAGES:
                assert other_end(other_end(action)) == action
                assert peer(other_end(action), schedule) == rank
