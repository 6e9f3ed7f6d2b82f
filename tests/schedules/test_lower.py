from collections import deque

import pytest
from drawn_sizes import schedules
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.schedules.build import build, forward_only
from phalanx.schedules.check_lowered import check_lowered
from phalanx.schedules.lower import add_reductions, add_transfers
from phalanx.schedules.messages import only_computing, peer
from phalanx.schedules.text import from_csv


@given(schedule=schedules())
def test_lowering_adds_messages_and_changes_nothing_else(schedule):
    lowered = add_transfers(schedule)
    check_lowered(lowered)
    assert only_computing(lowered) == schedule


@given(p=st.integers(1, 5), m=st.integers(1, 9), v=st.integers(1, 3))
def test_an_evaluation_is_lowered_in_any_sizes(p, m, v):
    check_lowered(add_transfers(forward_only(p, m, v)), trains=False)


class Obey:
    """Obeys lowered rows over untagged wires: messages are paired by their order alone.

    A tensor is the set of what went into it, so that a wrong delivery shows.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.wires: dict[tuple[int, int], deque[Action]] = {}
        self.places = [0] * schedule.p

    def run(self) -> None:
        while any(self.step(rank) for rank in range(self.schedule.p)):
            pass

    def step(self, rank: int) -> bool:
        row, place = self.schedule.rows[rank], self.places[rank]
        if place == len(row):
            return False
        action = row[place]
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            self.wires.setdefault((rank, peer(action, self.schedule)), deque()).append(action)
        elif action.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            wire = self.wires.get((peer(action, self.schedule), rank))
            if not wire:
                return False
            sent = wire.popleft()
            assert sent.microbatch == action.microbatch
            forward = action.kind is Kind.RECV_FORWARD
            assert sent.kind is (Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD)
            assert sent.stage == action.stage + (-1 if forward else 1)
        self.places[rank] += 1
        return True


@given(schedule=schedules())
def test_an_executor_that_pairs_messages_by_order_alone_delivers_every_tensor(schedule):
    lowered = add_transfers(schedule)
    obeyed = Obey(lowered)
    obeyed.run()
    assert obeyed.places == [len(row) for row in lowered.rows]
    assert not any(obeyed.wires.values())


def test_messages_stand_behind_their_maker_and_before_what_runs_while_they_travel():
    assert [" ".join(row) for row in add_transfers(build("1f1b", 2, 2)).texts()] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_stages_on_one_rank_exchange_no_messages():
    vee = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", "vee")
    assert [" ".join(row) for row in add_transfers(vee).texts()] == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    ]


def test_copies_of_the_model_exchange_no_messages():
    two = from_csv("0F0,2F1,2B1,0B0\n1F0,3F1,3B1,1B0\n", "two")
    assert two.copies == 2
    assert [" ".join(row) for row in add_transfers(two).texts()] == [
        "0F0 0SEND_F0 2F1 2SEND_F1 2RECV_B1 2B1 0RECV_B0 0B0",
        "1RECV_F0 3RECV_F1 1F0 3F1 3B1 3SEND_B1 1B0 1SEND_B0",
    ]


def test_rows_are_lowered_only_once():
    with pytest.raises(ScheduleError, match="already"):
        add_transfers(add_transfers(build("1f1b", 2, 2)))
    with pytest.raises(ScheduleError, match="already"):
        add_transfers(add_reductions(build("1f1b", 2, 2), every=True))


@given(schedule=schedules(), every=st.booleans())
def test_reductions_announce_the_last_or_every_backward_of_each_stage(schedule, every):
    lowered = add_reductions(add_transfers(schedule), every)
    check_lowered(lowered)
    for rank, row in enumerate(lowered.rows):
        for stage in schedule.stages_of(rank):
            ends = (Kind.BACKWARD, Kind.WEIGHT_GRAD)
            backwards = [a for a in row if a.stage == stage and a.kind in ends]
            announced = [
                row[n + 1] for n, a in enumerate(row) if (a.stage, a.kind) == (stage, Kind.REDUCE)
            ]
            assert announced == (backwards if every else backwards[-1:])


def test_the_weight_gradient_is_what_gets_reduced_where_backward_is_split():
    halves = from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n", "halves")
    assert add_reductions(halves, every=False).texts() == [
        ["0F0", "0F1", "0I0", "0I1", "0W0", "0REDUCE1", "0W1"]
    ]
