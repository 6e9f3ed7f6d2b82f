"""Prove, without processes, that the messages of a lowered schedule meet each other.

Point-to-point messages between two ranks run in the order in which each side issues them. A
schedule is safe if both sides agree on that order, even where a send blocks until it is received.
"""

from collections import deque
from itertools import zip_longest

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Action, Kind, Row, Schedule
from phalanx.schedules.check import check
from phalanx.schedules.lower import ACCUMULATES
from phalanx.schedules.messages import (
    RECEIVES,
    SENDS,
    other_end,
    peer,
    receive_of,
    send_of,
)


def check_lowered(schedule: Schedule, *, trains: bool = True) -> None:
    """Prove that the rows are complete, with every message and reduction in its place.

    The computing actions pass `check`. Every tensor that changes ranks is sent once, after it is
    made, and received once, before it is used. For every pair of ranks the two sequences of
    messages mirror each other, and even sends that block until they are received finish. If
    gradients are reduced, then those of every stage, in its last backward.

    Args:
        schedule: the rows.
        trains: whether backwards belong to it; False for an evaluation.

    Raises:
        ScheduleError: the message names the ranks and the actions at fault.
    """
    check(schedule, trains=trains)
    for rank, row in enumerate(schedule.rows):
        _require_messages(rank, row, schedule)
    _require_rendezvous(schedule)
    if any(action.kind is Kind.REDUCE for row in schedule.rows for action in row):
        for rank, row in enumerate(schedule.rows):
            _require_reductions(rank, row)


def _require_messages(rank: int, row: Row, schedule: Schedule) -> None:
    """Every message of the row once: a receive before its user, a send behind its maker."""
    received: set[Action] = set()
    unsent: set[Action] = set()
    for action in row:
        if action.kind in SENDS:
            if action not in unsent:
                raise ScheduleError(
                    f"rank {rank} does {action} where nothing is to be sent; "
                    "a send belongs once, behind the action that makes its tensor"
                )
            unsent.remove(action)
        elif action.kind in RECEIVES:
            if action in received:
                raise ScheduleError(f"rank {rank} does {action} twice; receive it once")
            received.add(action)
        else:
            receive, send = receive_of(action, schedule), send_of(action, schedule)
            if receive is not None:
                if receive not in received:
                    raise ScheduleError(
                        f"rank {rank} does {action} without {receive} before it; "
                        "a receive belongs once, before the action that uses its tensor"
                    )
                received.remove(receive)
            if send is not None:
                unsent.add(send)
    for idle in sorted(received | unsent, key=str):
        what = "never does" if idle in unsent else "does, without using it,"
        raise ScheduleError(f"rank {rank} {what} {idle}; every tensor moves and is used once")


def _require_rendezvous(schedule: Schedule) -> None:
    """Obey the rows with messages that block both ranks until they meet.

    What finishes so is mirrored, too, since every message met its other end.
    """
    rows = schedule.rows
    place = [0] * len(rows)
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        while place[rank] < len(rows[rank]):
            action = rows[rank][place[rank]]
            if action.kind in SENDS or action.kind in RECEIVES:
                other = peer(action, schedule)
                if _at(rows[other], place[other]) != other_end(action):
                    break
                place[other] += 1
                ready.append(other)
            place[rank] += 1
    stuck = [
        f"rank {rank} in {row[place[rank]]}"
        for rank, row in enumerate(rows)
        if place[rank] < len(row)
    ]
    if stuck:
        _require_mirrored(schedule)
        raise ScheduleError(
            f"messages that wait for ever: {', '.join(stuck)}; reorder the rows of these ranks"
        )


def _require_mirrored(schedule: Schedule) -> None:
    """For every pair of ranks, one's sends are the other's receives, in the same order."""
    links: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.kind in SENDS or action.kind in RECEIVES:
                links.setdefault((rank, peer(action, schedule)), []).append(action)
    for (rank, other), messages in links.items():
        mirror = [other_end(action) for action in links.get((other, rank), [])]
        if messages == mirror:
            continue
        place, (here, there) = next(
            (n, pair) for n, pair in enumerate(zip_longest(messages, mirror)) if pair[0] != pair[1]
        )
        answer = other_end(there) if there is not None else "nothing"
        raise ScheduleError(
            f"ranks {rank} and {other} disagree about message {place}: "
            f"{here or 'nothing'} on rank {rank}, {answer} on rank {other}; "
            "both rows need their messages in the same order"
        )


def _at(row: Row, place: int) -> Action | None:
    return row[place] if place < len(row) else None


def _require_reductions(rank: int, row: Row) -> None:
    """The gradients of every stage on the rank are reduced in its last backward."""
    final: dict[int, bool] = {}
    announced: set[int] = set()
    for action in row:
        if action.kind is Kind.REDUCE:
            announced.add(action.stage)
        elif action.kind in ACCUMULATES:
            final[action.stage] = action.stage in announced
            announced.discard(action.stage)
    missing = [stage for stage, reduced in final.items() if not reduced]
    if missing or announced:
        stage = min(missing or announced)
        raise ScheduleError(
            f"rank {rank} does not reduce the last gradients of stage {stage}; "
            f"put {stage}{Kind.REDUCE.value} before the last backward of the stage"
        )
