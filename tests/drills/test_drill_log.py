"""What a drill has found stays when it is ended, and is not done twice."""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.errors import UsageError
from phalanx.drills.campaign import DrillCase
from phalanx.drills.log import DrillLog

CASE = DrillCase("SIGKILL", "start", 3, True, 0.5, None, 2, True, ("the losses",))


def never() -> tuple[DrillCase, ...]:
    raise AssertionError("it was done before")


def test_what_was_done_before_is_shown_and_not_done_again(tmp_path: Path) -> None:
    log, seen = DrillLog(tmp_path / "log"), []
    log.open({"seed": 1, "faults": ("kill",)})
    assert log.cases(0, lambda: (CASE,)) == (CASE,)
    later = DrillLog(tmp_path / "log", seen.append)
    later.open({"seed": 1, "faults": ("kill",)})
    assert later.cases(0, never) == (CASE,)
    other = replace(CASE, rank=None)
    assert later.cases(1, lambda: (other, CASE)) == (other, CASE)
    assert seen == [CASE, other, CASE]
    last = DrillLog(tmp_path / "log")
    last.open({"seed": 1, "faults": ("kill",)})
    assert last.cases(1, never) == (other, CASE)


def test_the_log_of_another_drill_and_what_is_none_are_refused(tmp_path: Path) -> None:
    DrillLog(tmp_path / "log").open({"seed": 1, "kills": 3})
    with pytest.raises(UsageError, match=r"of another drill \(seed\); use another --log"):
        DrillLog(tmp_path / "log").open({"seed": 2, "kills": 3})
    (tmp_path / "log").write_text("In the beginning\n")
    with pytest.raises(UsageError, match="is no log of a drill"):
        DrillLog(tmp_path / "log").open({"seed": 2})
