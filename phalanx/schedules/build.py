"""The schedules by name: the one door through which the planner and the trainer get theirs."""

from phalanx.core.errors import RefusedError, UsageError, unknown
from phalanx.core.schedule import Schedule
from phalanx.schedules.check_lowered import check_lowered
from phalanx.schedules.forward_only import forward_only as forward_rows
from phalanx.schedules.gpipe import gpipe
from phalanx.schedules.interleaved import interleaved
from phalanx.schedules.lower import add_reductions, add_transfers
from phalanx.schedules.one_f_one_b import one_f_one_b

NAMES = ("gpipe", "1f1b", "interleaved")


def build(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Build the schedule `name` for `m` micro-batches over `p` ranks with `v` chunks each.

    Raises:
        UsageError: nobody knows the name, or a size is below 1.
        RefusedError: the schedule cannot be had in these sizes.
    """
    _require_positive(p, m, v)
    match name:
        case "gpipe":
            _require_one_chunk(name, v)
            return gpipe(p, m)
        case "1f1b":
            _require_one_chunk(name, v)
            return one_f_one_b(p, m)
        case "interleaved":
            return interleaved(p, m, v)
        case _:
            raise unknown("schedule", name, NAMES)


def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """Build the rows of an evaluation: forwards only, in any sizes.

    Raises:
        UsageError: a size is below 1.
    """
    _require_positive(p, m, v)
    return forward_rows(p, m, v)


def lowered(name: str, p: int, m: int, v: int, reduce_every: bool) -> Schedule:
    """Build what the trainer obeys: the schedule `name` with messages and reductions, checked.

    Args:
        name: of the schedule.
        p: pipeline ranks.
        m: micro-batches per step.
        v: chunks per rank.
        reduce_every: reduce gradients in every backward, not only in the last of each stage.

    Raises:
        UsageError: nobody knows the name, or a size is below 1.
        RefusedError: the schedule cannot be had in these sizes.
    """
    schedule = add_reductions(add_transfers(build(name, p, m, v)), every=reduce_every)
    check_lowered(schedule)
    return schedule


def lowered_forward_only(p: int, m: int, v: int) -> Schedule:
    """Build what an evaluation obeys: forwards with their messages, checked.

    Raises:
        UsageError: a size is below 1.
    """
    schedule = add_transfers(forward_only(p, m, v))
    check_lowered(schedule, trains=False)
    return schedule


def _require_positive(p: int, m: int, v: int) -> None:
    for name, size in (("p", p), ("m", m), ("v", v)):
        if size < 1:
            raise UsageError(f"{name}={size}; a schedule needs {name} of at least 1")


def _require_one_chunk(name: str, v: int) -> None:
    if v != 1:
        raise RefusedError(
            f"{name} holds one stage per rank, not v={v}; v can be 1, or use schedule interleaved"
        )
