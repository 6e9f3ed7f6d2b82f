"""Held-out loss: one number whatever the batch, plain, and never in the way of a stop."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_jobs import RECIPE, SHAPE, Trained, Watcher, small_run, train_job

from phalanx.core.layout import Layout
from phalanx.core.run import Data, Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import evaluate, forward_backward
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.text import open_text
from phalanx.trainer.run.trainer import train
from phalanx.trainer.run.worker import StopSignal, Worker


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As ranks that share a machine have: small products gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("In the beginning was the word, and the word was a byte.\n" * 60)
    return path


def with_recipe(run: Run, **recipe: object) -> Run:
    return replace(run, recipe=replace(run.recipe, **recipe))


def validated(run: Run, path: Path) -> Trained:
    path.mkdir()
    return train_job(run, path)


def uneven(tmp_path: Path) -> Run:
    """Two held-out windows of 16: in one a single token has a target, in the other all have."""
    ids = np.random.default_rng(0).integers(1, 256, 160 + 33).astype(np.uint8)
    ids[160:175] = 0  # documents that end where they begin: no target but the last token's
    ids.tofile(tmp_path / "ids.bin")
    data = Data(
        path=str(tmp_path / "ids.bin"),
        token_dtype="uint8",
        separator=0,
        document_mask=True,
        validation=33.5 / 193,
    )
    recipe = replace(RECIPE, steps=1, learning_rate=0.0)
    return Run(model=SHAPE, layout=Layout.parse("precision=fp64"), recipe=recipe, data=data)


def test_one_number_for_any_batch(tmp_path: Path) -> None:
    run = uneven(tmp_path)
    losses = [
        validated(with_recipe(run, batch=batch, evaluate_batches=count), tmp_path / str(batch))
        for batch, count in ((1, 2), (2, 1), (8, 1))  # the last has places left over
    ]
    first, *others = [trained.summary.validation_loss for trained in losses if trained.summary]
    assert others == pytest.approx([first, first], rel=1e-13)
    assert first is not None
    assert 5 < first < 6.5  # a new model knows nothing: about log 256


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["dp=2", "tp=2 pp=2 mb=2", "cp=2"])
def test_one_number_for_any_layout(ranks: RankPool, tmp_path: Path, line: str) -> None:
    run = with_recipe(uneven(tmp_path), batch=4, evaluate_batches=3)
    layout = Layout.parse(f"{line} precision=fp64")
    alone = validated(run, tmp_path / "alone").summary
    cut = ranks.run(layout.ranks, train_job, replace(run, layout=layout), tmp_path)[0].summary
    assert alone is not None
    assert cut is not None
    assert cut.validation_loss == pytest.approx(alone.validation_loss, rel=1e-12)


def losses(run: Run) -> tuple[float, float]:
    """Of one batch, to learn from and as it is measured."""
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    executor = engine.forward_executor(run.micro_batches, run.layout.mb, engine.executor_seq)
    batch = open_text(run).training.batch(0, engine.positions())
    return forward_backward(engine, 0, batch), evaluate(engine, executor, batch).mean


@pytest.mark.parametrize("line", ["precision=fp64", "logits=8 precision=fp64"])
def test_smoothed_labels_are_learned_from_and_not_measured(text: Path, line: str) -> None:
    run = replace(small_run(text), layout=Layout.parse(line))
    run = with_recipe(run, init_std=0.5)  # sure of itself, so that smoothing shows
    plain, plain_measured = losses(run)
    smoothed, measured = losses(with_recipe(run, label_smoothing=0.2))
    assert plain_measured == pytest.approx(plain, rel=1e-14)
    assert measured == plain_measured
    assert abs(smoothed - plain) > 0.01


class StopsInValidation(StopSignal):
    """Is asked to stop when it has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    @property
    def requested(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    @requested.setter
    def requested(self, value: bool) -> None:
        """Nobody else decides."""


def test_a_stop_is_heard_between_batches_of_a_validation(tmp_path: Path, text: Path) -> None:
    run = with_recipe(small_run(text), evaluate_every=1, evaluate_batches=400, batch=1)
    stop = StopsInValidation(looks=4)  # once after the step, then before each batch
    watcher = Watcher(StopSignal())
    worker = Worker(0, 1, 0, 1, torch.device("cpu"), stop)
    assert train(worker, run, RunDirectory(tmp_path), watcher) == 75
    assert [m.step for m in watcher.steps] == [1]
    assert watcher.summary is not None
    assert watcher.summary.validations == ()
    assert watcher.summary.interrupted
    assert (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").exists()
    assert "step 1: stopped before validation was over" in watcher.events


def test_what_is_measured_stands_in_the_metrics_and_in_the_summary(
    tmp_path: Path, text: Path
) -> None:
    run = with_recipe(small_run(text), evaluate_every=3, evaluate_batches=2, batch=2)
    summary = train_job(run, tmp_path).summary
    assert summary is not None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    measured = {line["step"]: line["validation_loss"] for line in lines if line["validation_loss"]}
    assert measured == {v.step: v.loss for v in summary.validations}
    assert list(measured) == [3, 6, 8]
    assert summary.validation_loss == measured[8]
    written = json.loads((tmp_path / "summary.json").read_text())
    assert [v["step"] for v in written["validations"]] == [3, 6, 8]
    times = [line["time"] for line in lines]
    assert times == sorted(times)


def test_no_step_pays_for_a_validation(tmp_path: Path, text: Path) -> None:
    run = with_recipe(
        small_run(text), steps=12, evaluate_every=4, evaluate_batches=150, batch=2, warmup=0
    )
    summary = train_job(run, tmp_path).summary
    assert summary is not None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert summary.seconds == pytest.approx(sum(summary.time_split.values()), rel=1e-6)
    spent = sum(v.seconds for v in summary.validations)
    assert summary.time_split["validation"] == pytest.approx(spent, rel=0.1)
    steps = sum(line["seconds"] for line in lines)
    assert summary.time_split["validation"] > steps / 2  # so it would show
    assert summary.time_split["compute"] < steps


def test_both_ends_of_the_loss_are_means_of_as_many_steps(tmp_path: Path, text: Path) -> None:
    run = with_recipe(small_run(text), steps=12)
    trained = train_job(run, tmp_path)
    assert trained.summary is not None
    assert trained.summary.averaged_steps == 3
    assert trained.summary.first_loss == pytest.approx(sum(trained.losses[:3]) / 3)
    assert trained.summary.last_loss == pytest.approx(sum(trained.losses[-3:]) / 3)
