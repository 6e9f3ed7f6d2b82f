"""A spike is met as the recipe says, alike on all ranks, and a later resume does the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from saved_tensors import equal
from trainer_jobs import Trained, injured_job, small_run, train_job, unhurried_job

from phalanx.core.errors import RefusedError
from phalanx.core.layout import Layout
from phalanx.core.run import Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.checkpoint.manifest import Manifest
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.events import read_events
from phalanx.trainer.run.limits import refuse_untrainable

pytestmark = pytest.mark.ranks

AT = 22  # the step that spikes, from 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Thirty steps on two ranks, with a checkpoint after every fifth."""
    text = tmp_path_factory.mktemp("text") / "book.txt"
    text.write_text("In the beginning was the word, and the word was a byte.\n" * 60)
    small = small_run(text)
    recipe = replace(
        small.recipe, steps=30, checkpoint_every=5, keep=9, spike="off", spike_window=8
    )
    model = replace(small.model, layers=2)
    return replace(small, model=model, layout=Layout.parse("dp=2"), recipe=recipe)


def under(run: Run, **recipe: object) -> Run:
    return replace(run, recipe=replace(run.recipe, **recipe))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def undisturbed(ranks: RankPool, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed")
    ranks.run(2, train_job, run, path)
    return path


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def spikes(folder: Path) -> list[str]:
    return [e["text"] for e in read_events(folder / "events.jsonl") if e["kind"] == "spike"]


def spiking(value: float | str, step: int = AT, times: int = 1) -> FaultPlan:
    """The loss of one rank becomes another on its way to the others."""
    fault = Fault(
        point="loss", action="set", value=value, tensor="loss", step=step, rank=1, times=times
    )
    return FaultPlan((fault,))


def injured(ranks: RankPool, run: Run, folder: Path, plan: FaultPlan) -> Trained:
    folder.mkdir(exist_ok=True)
    found: list[Trained] = ranks.run(2, injured_job, run, folder, plan)
    assert [rank.code for rank in found] == [0, 0]
    return found[0]


def test_looking_for_spikes_changes_no_bit_where_there_is_none(
    ranks: RankPool, tmp_path: Path, run: Run, undisturbed: Path
) -> None:
    for policy in ("tell", "skip", "rollback"):
        folder = tmp_path / policy
        folder.mkdir()
        ranks.run(2, train_job, under(run, spike=policy), folder)
        assert equal(folder, undisturbed)
        assert losses(folder) == losses(undisturbed)
        assert spikes(folder) == []


def test_a_spike_is_told_and_changes_nothing_else(
    ranks: RankPool, tmp_path: Path, run: Run, undisturbed: Path
) -> None:
    injured(ranks, under(run, spike="tell"), tmp_path, spiking(1e5))
    assert equal(tmp_path, undisturbed)
    (told,) = spikes(tmp_path)
    assert told.startswith(f"step {AT + 1}: the loss is ")
    injured(ranks, run, tmp_path / "off", spiking(1e5))
    assert spikes(tmp_path / "off") == []


@pytest.mark.parametrize("value", [1e5, "nan", "inf"])
def test_the_update_of_a_spike_is_skipped_on_all_ranks(
    ranks: RankPool, tmp_path: Path, run: Run, value: float | str
) -> None:
    folder = tmp_path / "run"
    injured(ranks, under(run, spike="skip", steps=AT + 1), folder, spiking(value))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [False] * AT + [True]
    (told,) = spikes(folder)
    assert told.endswith("; its update is skipped")
    whole = tmp_path / "whole"
    whole.mkdir()
    ranks.run(2, train_job, under(run, steps=AT + 1, stop_at=AT), whole)
    assert equal(folder, whole)


def skipping(source: Path, target: Path, step: int, to: int) -> None:
    """A checkpoint that says to go on with another batch, as a rollback would leave one."""
    (target / "checkpoints").mkdir(parents=True)
    manifest = Manifest.decode((source / "manifest.json").read_bytes())
    state = {**manifest.state, "skips": [[step, to - step]]}
    copy = target / "checkpoints" / source.name
    copy.mkdir()
    for file in source.glob("rank-*"):
        (copy / file.name).write_bytes(file.read_bytes())
    changed = Manifest(manifest.step, state, manifest.files, manifest.stored)
    (copy / "manifest.json").write_bytes(changed.encode())


@pytest.mark.parametrize("value", [1e5, "nan"])
def test_a_rollback_is_a_run_that_never_met_the_batches_around_the_spike(
    ranks: RankPool, tmp_path: Path, run: Run, undisturbed: Path, value: float | str
) -> None:
    folder, expected = tmp_path / "run", tmp_path / "expected"
    injured(ranks, under(run, spike="rollback"), folder, spiking(value))
    (told,) = spikes(folder)
    first = AT + 1 - run.recipe.spike_window
    assert told.endswith(
        f"going back to step 15, and skipping batches {first} to {AT} at step {first}"
    ) is (first >= 15)
    skipping(undisturbed / "checkpoints" / "step-00000015", expected, first, AT + 1)
    ranks.run(2, train_job, run, expected, Resume())
    assert equal(folder, expected)
    assert losses(folder)[:15] == losses(undisturbed)[:15]
    assert losses(folder)[15:] == losses(expected)


def test_a_later_resume_does_as_the_run_that_went_back(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    run = under(run, spike="rollback")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    injured(ranks, run, whole, spiking(1e5))
    injured(ranks, under(run, stop_at=26), cut, spiking(1e5))
    ranks.run(2, train_job, run, cut, Resume())
    assert equal(whole, cut)
    assert losses(whole) == losses(cut)
    assert len(losses(whole)) == 30


def test_checkpoints_of_the_way_that_is_left_are_not_gone_on_from(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    injured(ranks, under(run, spike="rollback", stop_at=AT + 2), tmp_path, spiking(1e5))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert "abandoned-step-00000020" in names
    assert names[-1] == f"step-{AT + 2:08}"


def test_no_rank_leaves_before_all_have_seen_the_last_save(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    """One that still looks for it would take a checkpoint that another has renamed for lost."""
    late = under(run, spike="rollback", stop_at=AT + 2, checkpoint_every=1, keep=30)
    found = ranks.run(2, unhurried_job, late, tmp_path, spiking(1e5))
    assert [rank.code for rank in found] == [0, 0]
    failed = [e["text"] for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "save"]
    assert failed == []


def test_a_spike_before_the_first_checkpoint_is_only_told(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    rare = under(run, spike="rollback", checkpoint_every=0)
    injured(ranks, rare, tmp_path, spiking(1e5))
    (told,) = spikes(tmp_path)
    assert told.endswith("; the run goes on")
    assert len(losses(tmp_path)) == 30


def test_rollbacks_that_do_not_help_come_to_an_end(
    ranks: RankPool, tmp_path: Path, run: Run
) -> None:
    injured(ranks, under(run, spike="rollback"), tmp_path, spiking(1e5, times=4))
    told = spikes(tmp_path)
    assert ["going back" in text for text in told] == [True, True, True, False]
    assert told[-1].endswith("3 rollbacks have not helped, so the run goes on")
    assert len(losses(tmp_path)) == 30


def test_a_schedule_that_moves_weights_at_once_cannot_skip(run: Run) -> None:
    run = replace(run, model=replace(run.model, tied=False))
    asked = under(
        replace(run, layout=Layout.parse("pp=2 schedule=pipedream")), spike="skip", clip=0.0
    )
    with pytest.raises(RefusedError, match=r"use recipe.spike=tell, rollback or off"):
        refuse_untrainable(asked)
