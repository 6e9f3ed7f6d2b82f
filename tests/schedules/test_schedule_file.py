"""A schedule from a file: read, checked against the layout, refused with the reason."""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.schedule import Kind, Row, Schedule
from phalanx.schedules.build import build, lowered
from phalanx.schedules.file import read_schedule, refuse_early_embedding
from phalanx.schedules.layouts import placement
from phalanx.schedules.lower import add_transfers
from phalanx.schedules.placement import placement_of
from phalanx.schedules.text import to_csv


def written(schedule: Schedule, folder: Path) -> str:
    path = folder / "rows.csv"
    path.write_text(to_csv(schedule), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "v"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe", 1)]
)
def test_a_written_schedule_trains_as_the_named_one(tmp_path: Path, name: str, v: int) -> None:
    named = Layout(pp=2, v=v, schedule=name)
    file = replace(named, schedule=written(build(name, 2, 4), tmp_path))
    assert placement(file) == placement(named)
    assert lowered(file, 4, reduce_every=False).rows == lowered(named, 4, reduce_every=False).rows


def test_messages_in_the_file_are_made_anew(tmp_path: Path) -> None:
    plain = build("zb-h1", 3, 5)
    path = written(add_transfers(plain), tmp_path)
    assert build(path, 3, 5).rows == plain.rows


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = written(build("gpipe", 2, 2), tmp_path)
    assert read_schedule(path).m == 2
    Path(path).write_text(to_csv(build("gpipe", 2, 30)), encoding="utf-8")
    assert read_schedule(path).m == 30


@pytest.mark.parametrize(
    ("p", "m", "v", "reason"),
    [
        (4, 4, 1, "p to be 2, not p=4"),
        (2, 4, 2, "v to be 1, not v=2"),
        (2, 8, 1, "m to be 4, not m=8"),
    ],
)
def test_other_sizes_are_refused_with_those_of_the_file(
    tmp_path: Path, p: int, m: int, v: int, reason: str
) -> None:
    path = written(build("1f1b", 2, 4), tmp_path)
    with pytest.raises(RefusedError, match=reason):
        build(path, p, m, v)


def test_an_incomplete_step_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    whole = build("1f1b", 2, 2)
    path = written(replace(whole, rows=(whole.rows[0][:-1], whole.rows[1])), tmp_path)
    with pytest.raises(RefusedError, match="rank 0 never does 0B1"):
        lowered(Layout(pp=2, schedule=path), 2, reduce_every=False)


def test_a_missing_file_is_named_with_what_writes_one() -> None:
    with pytest.raises(UsageError, match=r"no schedule nowhere.csv; write one by"):
        read_schedule("nowhere.csv")


def test_a_tied_table_wants_the_first_stage_last() -> None:
    fold = build("zb-v", 2, 4)
    refuse_early_embedding(fold)
    late = replace(fold, rows=(_with_last_w_of_the_loss_moved_back(fold.rows[0]), fold.rows[1]))
    with pytest.raises(RefusedError, match="rank 0 does 3W3 after 0W3"):
        refuse_early_embedding(late)


def _with_last_w_of_the_loss_moved_back(row: Row) -> Row:
    w = next(a for a in row if (a.stage, a.kind, a.microbatch) == (3, Kind.WEIGHT_GRAD, 3))
    return (*(a for a in row if a != w), w)


def test_a_schedule_that_stands_says_where_its_stages_live() -> None:
    assert placement_of(build("dualpipe", 4, 8)).slices_of(1) == (1, 2)
