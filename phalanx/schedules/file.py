"""Schedules from a CSV file, drawn by hand or made by another program."""

from functools import lru_cache
from pathlib import Path

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.schedule import Kind, Schedule
from phalanx.schedules.lower import ACCUMULATES
from phalanx.schedules.messages import only_computing
from phalanx.schedules.placement import placement_of
from phalanx.schedules.sizes import Sizes
from phalanx.schedules.spec import ScheduleSpec
from phalanx.schedules.text import from_csv


def read_schedule(path: str) -> Schedule:
    """Read the rows in a file: one line per rank, one action per cell.

    Raises:
        UsageError: there is no such file, or it is no text, or a cell is no action.
        ScheduleError: the rows do not make up a pipeline; see `from_csv`.
    """
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except FileNotFoundError:
        raise UsageError(
            f"there is no schedule {path}; write one by `phalanx schedule 1f1b --csv {path}`"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a .csv file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text; it has one line of actions per rank") from None


@lru_cache(maxsize=8)
def _read(path: str, _changed: int) -> Schedule:
    return from_csv(Path(path).read_text(encoding="utf-8"), Path(path).stem)


def spec_of_file(path: str) -> ScheduleSpec:
    """What the rows in a file say about themselves: they are for one number of each.

    Raises:
        UsageError: there is no such file, or it is no text, or a cell is no action.
        ScheduleError: the rows do not make up a pipeline; see `from_csv`.
    """
    schedule = only_computing(read_schedule(path))
    sizes = {key: Sizes(size, 1, size) for key, size in (("p", schedule.p), ("m", schedule.m))}
    chunks = schedule.v // schedule.copies
    return ScheduleSpec(
        name=path,
        title=Path(path).stem,
        description="rows from a file",
        source=path,
        rows=lambda p, m, v: schedule.rows,
        placement=lambda p, v: placement_of(schedule),
        ranks=sizes["p"],
        micro_batches=lambda p: sizes["m"],
        chunks=Sizes(chunks, 1, chunks),
        splits_backward=any(a.kind is Kind.INPUT_GRAD for row in schedule.rows for a in row),
    )


def refuse_early_embedding(schedule: Schedule) -> None:
    """Raise where a rank with both ends of the model finishes the first stage before the last.

    A table that both share is reduced with the first stage, so nothing may be added to it later.

    Raises:
        RefusedError: with the actions that would have to change places.
    """
    for rank, row in enumerate(schedule.rows):
        last = {a.stage % schedule.depth: a for a in row if a.kind in ACCUMULATES}
        begin, end = last.get(0), last.get(schedule.depth - 1)
        if begin and end and begin != end and row.index(begin) < row.index(end):
            raise RefusedError(
                f"rank {rank} does {end} after {begin}, but both add to the tied embedding, which "
                f"is reduced with {begin}; put {end} first, or use model.tied=false"
            )
