"""One start at a time writes to a run: the others are refused, or set aside."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from one_writer_jobs import taken_over_job
from trainer_jobs import small_run, train_job

from phalanx.core.errors import RefusedError
from phalanx.core.layout import Layout
from phalanx.core.run import Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.checkpoint import Checkpoint
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "book.txt").write_text("In the beginning was the word, and it was a byte.\n" * 60)
    short = small_run(tmp_path / "book.txt")
    recipe = replace(short.recipe, checkpoint_every=2, stop_at=4)
    return replace(short, layout=Layout.parse("dp=1"), recipe=recipe)


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_second_start_of_a_name_is_refused_within_a_second(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "a") as first:
        first.run_file.touch()
        before = time.monotonic()
        with pytest.raises(RefusedError, match="is in use by process"):
            RunDirectory.open_for_resume(tmp_path, "a").__enter__()
        assert time.monotonic() - before < 1.0


def test_who_comes_later_writes_and_who_was_there_does_not(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    first, second = directory.take_over(), directory.take_over()
    directory.require_own(second)
    with pytest.raises(RefusedError, match="taken over by start 2 while start 1 still ran"):
        directory.require_own(first)


@pytest.mark.ranks
def test_a_run_that_was_taken_over_saves_no_more(ranks: RankPool, run: Run, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="taken over by start 2 while start 1 still ran"):
        ranks.run(1, taken_over_job, run, tmp_path)
    assert steps_of(tmp_path) == [1]
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.ranks
def test_a_checkpoint_of_a_start_that_was_left_behind_is_set_aside(
    ranks: RankPool, run: Run, tmp_path: Path
) -> None:
    saved, away = tmp_path / "checkpoints" / "step-00000004", tmp_path / "away"
    ranks.run(1, train_job, run, tmp_path)
    with Checkpoint.open(saved) as checkpoint:
        assert checkpoint.state["fence"] == 1
    saved.rename(away)
    until_3 = replace(run, recipe=replace(run.recipe, stop_at=3))
    ranks.run(1, train_job, until_3, tmp_path, Resume())  # the second start goes on from step 2
    away.rename(saved)  # and now the first one commits
    resumed = ranks.run(1, train_job, run, tmp_path, Resume())[0]
    assert len(resumed.losses) == 1
    assert "step-00000004 was saved by start 1 of this run after start 2 had begun" in str(
        resumed.events
    )
    assert saved.with_name("stale-step-00000004").exists()
