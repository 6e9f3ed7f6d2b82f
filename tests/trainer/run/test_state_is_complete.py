"""Everything that a checkpoint holds is needed: without any one part a resumed run is another."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_jobs import SHAPE, small_run

from phalanx.core.layout import Layout
from phalanx.core.run import Run
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.run import resume as resuming
from phalanx.trainer.run import state as states
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.report import Silent, StepMetrics
from phalanx.trainer.run.rundir import RunDirectory
from phalanx.trainer.run.trainer import train
from phalanx.trainer.run.worker import StopSignal, Worker


class Losses(Silent):
    """Keeps them."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.seen.append(metrics.loss)


def trained(run: Run, folder: Path, resume: Resume | None = None) -> list[float]:
    """Losses of a run on this very process."""
    losses = Losses()
    folder.mkdir(exist_ok=True)
    worker = Worker(0, 1, 0, 1, torch.device("cpu"), StopSignal())
    assert train(worker, run, RunDirectory(folder), losses, resume) == 0
    return losses.seen


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("complete")


@pytest.fixture(scope="module")
def run(home: Path) -> Run:
    """With all that a checkpoint can hold of it: moments, and biases of experts."""
    (home / "book.txt").write_text("In the beginning was the word, and it was a byte.\n" * 60)
    short = small_run(home / "book.txt")
    model = replace(SHAPE, experts=4, top_k=2, moe_ffn=16, dense_layers=1)
    recipe = replace(short.recipe, balance_speed=0.1, dropout=0.1)
    return replace(short, layout=Layout.parse("dp=1"), model=model, recipe=recipe)


@pytest.fixture(scope="module")
def once(run: Run, home: Path) -> list[float]:
    """Losses of the whole run."""
    return trained(run, home / "once")


@pytest.fixture
def half(run: Run, home: Path, tmp_path: Path) -> Path:
    """The folder of a run of which half is done, to go on in."""
    if not (home / "half").exists():
        trained(replace(run, recipe=replace(run.recipe, stop_at=4)), home / "half")
    return Path(shutil.copytree(home / "half", tmp_path / "half"))


def forget_updates(engine: Engine) -> None:
    engine.optimizer.updates = 0


def forget_moments(engine: Engine) -> None:
    for sharded in engine.units:
        for moment in engine.optimizer.moments(sharded.unit).values():
            moment.zero_()


def forget_weights(engine: Engine) -> None:
    for sharded in engine.units:
        sharded.unit.master.mul_(1 + 2**-20)
        sharded.all_gather_weights()


def forget_biases(engine: Engine) -> None:
    for router in engine.balancer.routers:
        router.bias.zero_()


@pytest.mark.parametrize(
    "forget", [forget_updates, forget_moments, forget_weights, forget_biases, None]
)
def test_a_resume_that_forgets_any_part_of_the_state_comes_to_other_losses(
    run: Run, once: list[float], half: Path, monkeypatch: pytest.MonkeyPatch, forget
) -> None:
    def restore(engine, checkpoint):
        step = states.restore(engine, checkpoint)
        if forget is not None:
            forget(engine)
        return step

    monkeypatch.setattr(resuming, "restore", restore)
    assert (trained(run, half, Resume()) == once[4:]) == (forget is None)


def test_a_resume_at_another_place_in_the_data_comes_to_other_losses(
    run: Run, once: list[float], half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "restore", lambda e, c: states.restore(e, c) + 1)
    assert trained(run, half, Resume()) != once[5:]
