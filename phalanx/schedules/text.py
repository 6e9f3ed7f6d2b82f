"""Schedules as text: `2F0`, one line per rank, as torch.distributed.pipelining reads and writes.

A CSV file has one line per rank and one action per cell; empty cells are idle slots and are
skipped. Such files can be drawn by hand, or exchanged with torch.
"""

import csv
import io
import re
from collections.abc import Collection
from dataclasses import replace

from phalanx.core.errors import ScheduleError, UsageError
from phalanx.core.schedule import Action, Kind, Row, Schedule

_KINDS = {kind.value: kind for kind in Kind}
_ACTION = re.compile(rf"(\d{{1,9}})({'|'.join(_KINDS)})(\d{{1,9}})", re.ASCII)


def parse_action(text: str) -> Action:
    """Read one action such as `2F0` or `1SEND_F3`; the inverse of `str`.

    Raises:
        UsageError: the text is no action.

    Example:
        >>> parse_action("1SEND_F3")
        Action(stage=1, kind=<Kind.SEND_FORWARD: 'SEND_F'>, microbatch=3)
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"cannot read {text.strip()!r} as an action; write stage, kind and micro-batch, as in "
            f"2F0; kinds: {', '.join(_KINDS)}"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), _KINDS[kind], int(microbatch))


def to_csv(schedule: Schedule) -> str:
    """Write the rows, one line per rank."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(schedule.texts())
    return out.getvalue()


def from_csv(text: str, name: str) -> Schedule:
    """Read rows, one line per rank; sizes and placement follow from the actions.

    Args:
        text: the contents of the file.
        name: what to call the schedule.

    Raises:
        UsageError: a cell is no action, or there are none.
        ScheduleError: a stage stands on two ranks, a stage or a micro-batch is missing, or ranks
            hold unequal numbers of stages.

    Example:
        >>> drawn = from_csv("0F0,0F1,,0B0,0B1", "drawn")
        >>> drawn.p, drawn.m, drawn.texts()
        (1, 2, [['0F0', '0F1', '0B0', '0B1']])
    """
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise UsageError(f"{name} is no CSV file ({error}); write lines such as 0F0,0B0") from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    rows = tuple(tuple(parse_action(c) for c in line if c.strip()) for line in lines)
    if not any(rows):
        raise UsageError(f"{name} has no actions; write one line per rank, as in 0F0,0B0")
    ranks = _placement(rows)
    p = len(rows)
    if len(ranks) % p:
        raise ScheduleError(f"{name} cuts {len(ranks)} stages over {p} ranks; {p} must divide them")
    microbatches = {action.microbatch for row in rows for action in row}
    _require_no_gap("micro-batch", microbatches)
    schedule = Schedule(name, p, len(microbatches), len(ranks) // p, rows, ranks)
    twice = replace(schedule, copies=2)
    return twice if _works_apart(twice) else schedule


def _works_apart(schedule: Schedule) -> bool:
    """Whether the stages fall into copies of the model with micro-batches of their own."""
    if schedule.num_stages % schedule.copies or schedule.m % schedule.copies:
        return False
    found: dict[int, set[int]] = {}
    for row in schedule.rows:
        for action in row:
            found.setdefault(action.stage, set()).add(action.microbatch)
    return all(mine == set(schedule.microbatches_of(stage)) for stage, mine in found.items())


def _placement(rows: tuple[Row, ...]) -> tuple[int, ...]:
    """The rank of each stage: the row in which the stage stands."""
    holder: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            first = holder.setdefault(action.stage, rank)
            if first != rank:
                raise ScheduleError(
                    f"stage {action.stage} stands on rank {first} and, as {action}, on rank "
                    f"{rank}; a stage lives on one rank"
                )
    _require_no_gap("stage", holder)
    return tuple(holder[stage] for stage in range(len(holder)))


def _require_no_gap(what: str, numbers: Collection[int]) -> None:
    gap = next((n for n in range(len(numbers)) if n not in numbers), None)
    if gap is not None:
        raise ScheduleError(
            f"{what} {gap} stands nowhere, but {what} {max(numbers)} does; "
            "number them from 0 without gaps"
        )
