"""Which tensors change ranks: the messages that a schedule needs, and who is at their other end.

An output goes to the next stage as SEND_F and RECV_F; the gradient of an input goes to the
previous stage as SEND_B and RECV_B. Between stages on one rank there is no message.
"""

from dataclasses import replace

from phalanx.core.schedule import Action, Kind, Schedule

SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)

_OTHER_END = {
    Kind.SEND_FORWARD: (1, Kind.RECV_FORWARD),
    Kind.RECV_FORWARD: (-1, Kind.SEND_FORWARD),
    Kind.SEND_BACKWARD: (-1, Kind.RECV_BACKWARD),
    Kind.RECV_BACKWARD: (1, Kind.SEND_BACKWARD),
}


def send_of(action: Action, schedule: Schedule) -> Action | None:
    """The send that has to follow the computation `action`, if its tensor changes ranks.

    Args:
        action: a computation.
        schedule: says which rank holds which stage.
    """
    stage, kind, i = action
    if kind is Kind.FORWARD and _crosses(stage, stage + 1, schedule):
        return Action(stage, Kind.SEND_FORWARD, i)
    if (kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD) and _crosses(stage, stage - 1, schedule):
        return Action(stage, Kind.SEND_BACKWARD, i)
    return None


def receive_of(action: Action, schedule: Schedule) -> Action | None:
    """The receive that the computation `action` waits for, if its tensor comes from elsewhere.

    Args:
        action: a computation.
        schedule: says which rank holds which stage.
    """
    stage, kind, i = action
    if kind is Kind.FORWARD and _crosses(stage, stage - 1, schedule):
        return Action(stage, Kind.RECV_FORWARD, i)
    if (kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD) and _crosses(stage, stage + 1, schedule):
        return Action(stage, Kind.RECV_BACKWARD, i)
    return None


def other_end(message: Action) -> Action:
    """The receive that belongs to a send, or the send that belongs to a receive."""
    offset, kind = _OTHER_END[message.kind]
    return Action(message.stage + offset, kind, message.microbatch)


def peer(message: Action, schedule: Schedule) -> int:
    """The pipeline rank at the other end of a send or a receive.

    Args:
        message: a send or a receive.
        schedule: says which rank holds which stage.
    """
    return schedule.ranks[message.stage + _OTHER_END[message.kind][0]]


def only_computing(schedule: Schedule) -> Schedule:
    """The rows before any pass: no messages, no reductions; `schedule` itself if there are none."""
    if all(kind.computes for row in schedule.rows for kind in {a.kind for a in row}):
        return schedule
    rows = tuple(tuple(a for a in row if a.kind.computes) for row in schedule.rows)
    return replace(schedule, rows=rows)


def _crosses(stage: int, other: int, schedule: Schedule) -> bool:
    """Whether two stages exchange tensors over the network: neighbours, on different ranks."""
    ranks = schedule.ranks
    if not 0 <= other < len(ranks) or ranks[other] == ranks[stage]:
        return False
    return schedule.copies == 1 or stage // schedule.depth == other // schedule.depth
