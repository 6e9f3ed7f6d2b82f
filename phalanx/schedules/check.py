"""Prove, without running anything, that the rows of a schedule can be obeyed."""

from enum import Enum

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.schedules.messages import only_computing
from phalanx.schedules.play import play


class Progress(Enum):
    """How far one micro-batch has come on one stage."""

    NOTHING = "before all else"
    FORWARD = "after its forward"
    INPUT_GRAD = "after its input gradient"
    ALL = "after its backward"


# What an action needs to find, and what it leaves.
STEPS: dict[Kind, tuple[Progress, Progress]] = {
    Kind.FORWARD: (Progress.NOTHING, Progress.FORWARD),
    Kind.BACKWARD: (Progress.FORWARD, Progress.ALL),
    Kind.INPUT_GRAD: (Progress.FORWARD, Progress.INPUT_GRAD),
    Kind.WEIGHT_GRAD: (Progress.INPUT_GRAD, Progress.ALL),
}


def check(schedule: Schedule, *, trains: bool = True) -> None:
    """Prove that the computing actions of the rows are complete, in order and free of deadlock.

    Every micro-batch passes every stage once: F, then B or (I, then W), on the rank that holds
    the stage; and no rank waits for ever. Messages and reductions are left to `check_lowered`.

    Args:
        schedule: the rows.
        trains: whether backwards belong to it; False for an evaluation.

    Raises:
        ScheduleError: the message names the ranks and the actions at fault.

    Example:
        >>> from phalanx.schedules.text import from_csv
        >>> check(from_csv("0F0,0B0,0F1,0B1", "drawn"))
        >>> check(from_csv("0F0,0F1,0B0", "drawn"))
        Traceback (most recent call last):
        phalanx.core.errors.ScheduleError: rank 0 never does 0B1; ...
    """
    schedule = only_computing(schedule)
    progress = {
        (stage, i): Progress.NOTHING
        for stage in range(schedule.num_stages)
        for i in schedule.microbatches_of(stage)
    }
    for rank, row in enumerate(schedule.rows):
        for action in row:
            _advance(action, rank, schedule, progress)
    _require_complete(schedule, progress, trains)
    play(schedule)


def _advance(
    action: Action, rank: int, schedule: Schedule, progress: dict[tuple[int, int], Progress]
) -> None:
    stage, kind, i = action
    found = progress.get((stage, i))
    if found is None:
        raise ScheduleError(f"rank {rank} does {action}; {_existing(stage, schedule)}")
    holder = schedule.ranks[stage]
    if holder != rank:
        raise ScheduleError(
            f"rank {rank} does {action}, but rank {holder} holds stage {stage}; "
            f"move it to rank {holder}"
        )
    needed, left = STEPS[kind]
    if found is not needed:
        raise ScheduleError(
            f"rank {rank} does {action} {found.value} on stage {stage}; "
            f"it belongs there once, {needed.value}"
        )
    progress[stage, i] = left


def _existing(stage: int, schedule: Schedule) -> str:
    if not 0 <= stage < schedule.num_stages:
        return f"stages go from 0 to {schedule.num_stages - 1}"
    mine = schedule.microbatches_of(stage)
    return f"the micro-batches of stage {stage} go from {mine.start} to {mine.stop - 1}"


def _require_complete(
    schedule: Schedule, progress: dict[tuple[int, int], Progress], trains: bool
) -> None:
    end = Progress.ALL if trains else Progress.FORWARD
    missing = {Progress.NOTHING: Kind.FORWARD, Progress.INPUT_GRAD: Kind.WEIGHT_GRAD}
    for (stage, i), found in progress.items():
        if found is end:
            continue
        rank = schedule.ranks[stage]
        if not trains and found is not Progress.NOTHING:
            raise ScheduleError(
                f"rank {rank} goes backward through stage {stage} with micro-batch {i}; "
                "an evaluation has forwards only"
            )
        action = Action(stage, missing.get(found, Kind.BACKWARD), i)
        raise ScheduleError(
            f"rank {rank} never does {action}; every stage needs F, then B (or I and W), "
            "of every micro-batch"
        )
