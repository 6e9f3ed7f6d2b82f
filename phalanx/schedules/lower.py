"""Passes over a schedule: add what the network has to do to the rows of what is computed.

A generator says only what is computed, and in which order. These passes put in the messages
between ranks and the points where gradients are reduced.
"""

from dataclasses import replace

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Action, Kind, Row, Schedule
from phalanx.schedules.messages import only_computing, other_end, send_of
from phalanx.schedules.play import UNIT, play, seconds_table

ACCUMULATES = (Kind.BACKWARD, Kind.WEIGHT_GRAD)  # what adds to the gradients of the weights


def add_transfers(schedule: Schedule) -> Schedule:
    """Put a send and a receive into the rows wherever a tensor changes ranks.

    All messages follow one global order: that in which their tensors would be ready if every
    action took its unit time. Both ranks of a message have it at the same place of that order,
    so two ranks never disagree about which message is next, and the earliest unfinished action
    can always proceed: even sends that block until they are received cannot deadlock.

    A send stands right behind the action that made the tensor. A receive stands before the
    action during which the tensor arrives, so that the message travels meanwhile; not earlier,
    since a posted receive holds its buffer.

    Raises:
        ScheduleError: the rows have been lowered already, or cannot be played.
    """
    if only_computing(schedule) is not schedule:
        raise ScheduleError("these rows have messages or reductions already; lower them only once")
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for rank, action in _by_completion(schedule):
        rows[rank].append(action)
        send = send_of(action, schedule)
        if send is not None:
            receive = other_end(send)
            rows[rank].append(send)
            rows[schedule.ranks[receive.stage]].append(receive)
    return replace(schedule, rows=tuple(tuple(row) for row in rows))


def add_reductions(schedule: Schedule, every: bool) -> Schedule:
    """Put a reduction before the backward that makes gradients final.

    Args:
        schedule: the rows, after `add_transfers`.
        every: reduce what every backward leaves (gradients live sharded), rather than only
            the last one of each stage. Where backward is split, W stands for it.
    """
    return replace(schedule, rows=tuple(_reduced(row, every) for row in schedule.rows))


def _reduced(row: Row, every: bool) -> Row:
    last = {action.stage: action for action in row if action.kind in ACCUMULATES}
    actions: list[Action] = []
    for action in row:
        if action.kind in ACCUMULATES and (every or last[action.stage] == action):
            actions.append(Action(action.stage, Kind.REDUCE, action.microbatch))
        actions.append(action)
    return tuple(actions)


def _by_completion(schedule: Schedule) -> list[tuple[int, Action]]:
    """All actions with their ranks, in the order in which they end at unit costs."""
    seconds = seconds_table(schedule, UNIT)
    ends = [
        (start + seconds[action.kind][action.stage], rank, place)
        for rank, (row, starts) in enumerate(zip(schedule.rows, play(schedule), strict=True))
        for place, (action, start) in enumerate(zip(row, starts, strict=True))
    ]
    return [(rank, schedule.rows[rank][place]) for _, rank, place in sorted(ends)]
