"""Schedules to draw, to time and to obey, from the name that a layout or a person gives."""

from phalanx.core.layout import Layout
from phalanx.core.schedule import Schedule
from phalanx.schedules.check_lowered import check_lowered
from phalanx.schedules.forward_only import forward_only as forward_rows
from phalanx.schedules.layouts import chunks
from phalanx.schedules.lower import add_reductions, add_transfers
from phalanx.schedules.placement import Placement, looped
from phalanx.schedules.registry import find_schedule
from phalanx.schedules.spec import require_positive


def build(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """Build the schedule `name` for `m` micro-batches over `p` ranks with `v` chunks each.

    Args:
        name: as a layout has it; see `find_schedule`.
        p: pipeline ranks.
        m: micro-batches per step.
        v: chunks of layers per rank; None means as few as the schedule can have.

    Raises:
        UsageError: there is no such schedule, or a size is below 1.
        RefusedError: the schedule cannot be had in these sizes.

    Example:
        >>> for row in build("zb-h1", p=2, m=2).texts():
        ...     print(*row)
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    return find_schedule(name).build(p, m, v)


def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """Build the rows of an evaluation: forwards only, in any sizes.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: chunks of layers per rank.

    Raises:
        UsageError: a size is below 1.
    """
    require_positive(p, m, v)
    return forward_rows(looped(p, v), m)


def lowered(layout: Layout, m: int, reduce_every: bool) -> Schedule:
    """Build what the trainer obeys: the layout's schedule with messages and reductions, checked.

    Args:
        layout: names the schedule, the ranks and the chunks.
        m: micro-batches per step.
        reduce_every: reduce gradients in every backward, not only in the last of each stage.

    Raises:
        UsageError: there is no such schedule.
        RefusedError: the schedule cannot be had in these sizes.
        ScheduleError: rows from a file or from elsewhere cannot be obeyed.

    Example:
        >>> print(*lowered(Layout(pp=2), m=1, reduce_every=False).texts()[1])
        1RECV_F0 1F0 1REDUCE0 1B0 1SEND_B0
    """
    schedule = build(layout.schedule, layout.pp, m, chunks(layout))
    schedule = add_reductions(add_transfers(schedule), every=reduce_every)
    check_lowered(schedule)
    return schedule


def lowered_forward_only(where: Placement, m: int) -> Schedule:
    """Build what an evaluation obeys: forwards with their messages, checked.

    Args:
        where: the rank that holds each stage.
        m: micro-batches per step.
    """
    schedule = add_transfers(forward_rows(where, m))
    check_lowered(schedule, trains=False)
    return schedule
