"""A save that fails, or whose state is not finite, never harms: the run ends as if nothing was."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_jobs import Trained, apart_job, injured_job, small_run, train_job

from phalanx.core.errors import CheckpointError, RefusedError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.checkpoint import newest
from phalanx.trainer.checkpoint.names import steps
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.run.events import read_events

pytestmark = pytest.mark.ranks

SHAPE = ModelShape(layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256, tied=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps on two ranks, with a checkpoint after every second."""
    text = tmp_path_factory.mktemp("text") / "book.txt"
    text.write_text("In the beginning was the word, and the word was a byte.\n" * 60)
    small = small_run(text)
    recipe = replace(
        small.recipe, steps=10, checkpoint_every=2, keep=5, evaluate_every=5, check_every=0
    )
    return replace(small, model=SHAPE, layout=Layout.parse("dp=2"), recipe=recipe)


@pytest.fixture(scope="module")
def undisturbed(ranks: RankPool, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed")
    ranks.run(2, train_job, run, path)
    return path


def state(folder: Path) -> dict[str, Any]:
    """Every tensor of the newest checkpoint, and what it says besides."""
    found = newest(folder / "checkpoints", pytest.fail)
    assert found is not None
    with found:
        names = [(name, field) for name in found.names() for field in found.fields(name)]
        return {"state": found.state, **{str(key): found.tensor(*key) for key in names}}


def same(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same bits, and measured the same losses, each step once."""
    a, b = state(one), state(other)
    tensors = all(torch.equal(a[key], b[key]) for key in a if key != "state")
    return (
        a.keys() == b.keys() and a["state"] == b["state"] and tensors and told(one) == told(other)
    )


def told(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["validation_loss"]) for line in lines]


def events(folder: Path, kind: str) -> list[str]:
    return [e["text"] for e in read_events(folder / "events.jsonl") if e["kind"] == kind]


def injured(ranks: RankPool, run: Run, folder: Path, *planned: Fault) -> Trained:
    found: Trained = ranks.run(2, injured_job, run, folder, FaultPlan(planned))[0]
    return found


SLOW = Fault(point="save.write", action="sleep", value=0.5, step=4)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(point="save.write", action="error", value="ENOSPC", step=4),
        Fault(point="save.write", action="error", value="EIO", step=4),
        Fault(point="save.write", action="short", step=4),
        Fault(point="save.written", action="error", value="EACCES", step=4),
        SLOW,
    ],
    ids=lambda fault: f"{fault.action} {fault.value}",
)
def test_a_disk_that_fails_costs_one_checkpoint_and_nothing_else(
    ranks: RankPool, tmp_path: Path, run: Run, undisturbed: Path, fault: Fault, rank: int
) -> None:
    assert injured(ranks, run, tmp_path, replace(fault, rank=rank)).code == 0
    assert same(tmp_path, undisturbed)
    failed = events(tmp_path, "save")
    there = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    if fault is SLOW:
        assert failed == []
        assert there == [f"step-{step:08}" for step in (2, 4, 6, 8, 10)]
        return
    assert len(failed) == 1
    assert "cannot save step 4" in failed[0]
    assert "training goes on, and earlier checkpoints stay" in failed[0]
    assert there == [f"step-{step:08}" for step in (2, 6, 8, 10)]


def test_the_last_save_is_tried_again(
    ranks: RankPool, tmp_path: Path, run: Run, undisturbed: Path
) -> None:
    fault = Fault(point="save.write", action="error", value="ENOSPC", step=10, rank=1)
    assert injured(ranks, run, tmp_path, fault).code == 0
    assert same(tmp_path, undisturbed)
    assert len(events(tmp_path, "save")) == 1


def test_several_failures_in_a_row_end_the_run(ranks: RankPool, tmp_path: Path, run: Run) -> None:
    fault = Fault(point="save.written", action="error", value="ENOSPC", rank=1, times=100)
    with pytest.raises(CheckpointError, match="3 saves in a row have failed"):
        injured(ranks, run, tmp_path, fault)
    assert steps(tmp_path / "checkpoints") == []


def spoil(name: str, step: int = 4, times: int = 1) -> Fault:
    """One value of a tensor becomes nan on the last rank: in a table, that of a rare byte."""
    return Fault(
        point="step.before",
        action="set",
        value="nan",
        step=step,
        times=times,
        tensor=name,
        element=-1,
        rank=1,
    )


@pytest.mark.parametrize(
    ("name", "step"),
    [("weight:head", 4), ("weight:embedding", 4), ("weight:embedding", 9), ("exp_avg:head", 6)],
)
def test_a_state_that_is_not_finite_is_found_when_saving_and_the_run_goes_back(
    ranks: RankPool, tmp_path: Path, run: Run, undisturbed: Path, name: str, step: int
) -> None:
    """In the head every loss is nan; in the row of a byte that never comes nothing shows it."""
    assert injured(ranks, run, tmp_path, spoil(name, step)).code == 0
    assert same(tmp_path, undisturbed)
    back = step - step % 2
    (why,) = events(tmp_path, "resume")
    assert why.endswith(f"and is not saved; going back to step {back}")
    assert "1 value is nan or infinite in" in events(tmp_path, "save")[0] or "head" in name


def test_what_comes_again_after_going_back_ends_the_run(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    with pytest.raises(CheckpointError, match=r"step 6 is nan .*, again after it went back; go on"):
        injured(ranks, run, tmp_path, spoil("weight:head", times=100))
    assert [step for step, _ in steps(tmp_path / "checkpoints")] == [4, 2]


def test_where_there_is_nothing_to_go_back_to_it_is_said(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to go back to: start again with"):
        injured(ranks, run, tmp_path, spoil("weight:head", step=0))


def test_weights_that_are_nan_are_found_long_before_a_save_is_due(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    rare = replace(run, recipe=replace(run.recipe, steps=30, checkpoint_every=0, keep_every=2))
    rare = replace(rare, recipe=replace(rare.recipe, keep_every=15))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    ranks.run(2, train_job, rare, whole)
    assert injured(ranks, rare, cut, spoil("weight:head", step=16)).code == 0
    (why,) = events(cut, "resume")
    assert why == "the weights are nan or infinite after step 26; going back to step 15"
    assert same(whole, cut)


def test_ranks_that_share_no_folder_are_told_at_the_start(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    with pytest.raises(RefusedError, match=r"what ranks 1 write to .* is not seen by rank 0"):
        ranks.run(2, apart_job, run, tmp_path)
    assert list((tmp_path / "0" / "checkpoints").iterdir()) == []
