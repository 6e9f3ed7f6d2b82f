"""A run goes on by itself after a rank has died, as if none had; and knows when to give up."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.core.errors import DataError, PhalanxError, RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.trainer.checkpoint import newest
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.faults.inject import PLAN
from phalanx.trainer.run.events import EventLog, read_events
from phalanx.trainer.run.restart import Restarter, WorkerCrashError
from phalanx.trainer.run.rundir import RunDirectory

SHAPE = ModelShape(layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256, tied=True)
RECIPE = Recipe(
    seq=16, batch=4, steps=8, warmup=2, evaluate_batches=1, sample_tokens=0, checkpoint_every=2
)

Injure = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "book.txt").write_text("In the beginning was the word, and it was a byte.\n" * 60)
    data = Data(path=str(tmp_path / "book.txt"), validation=0.1)
    return Run(model=SHAPE, recipe=RECIPE, data=data, layout=Layout.parse("dp=2"))


@pytest.fixture
def injure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Injure:
    """Let the runs of a test meet faults."""

    def plan(*faults: Fault) -> None:
        (tmp_path / "plan.json").write_text(FaultPlan(faults).to_json())
        monkeypatch.setenv(PLAN, str(tmp_path / "plan.json"))

    return plan


def kill(point: str, step: int | None, rank: int, attempt: int) -> Fault:
    return Fault(
        point=point, action="signal", value="SIGKILL", step=step, rank=rank, attempt=attempt
    )


def steps(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def tensors(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = newest(folder / "checkpoints", pytest.fail)
    assert checkpoint is not None
    with checkpoint:
        return {
            (name, field): checkpoint.tensor(name, field)
            for name in checkpoint.names()
            for field in checkpoint.fields(name)
        }


@pytest.mark.ranks
def test_a_run_whose_ranks_are_killed_is_the_undisturbed_run_bit_for_bit(
    run: Run, tmp_path: Path, injure: Injure
) -> None:
    undisturbed = phalanx.train(run, name="undisturbed", runs=tmp_path)
    injure(
        kill("step.before", 1, rank=1, attempt=0),  # nothing is saved yet
        kill("step.before_update", 5, rank=0, attempt=1),  # step 2 is saved, and 4 begun
        kill("resume.after", None, rank=1, attempt=2),
        kill("save.copied", 6, rank=0, attempt=3),  # while the save is written
        kill("validation", 8, rank=1, attempt=4),
    )
    killed = phalanx.train(run, name="killed", runs=tmp_path)
    one, other = tmp_path / "undisturbed", tmp_path / "killed"
    assert steps(one) == steps(other)
    assert [step for step, _, _ in steps(other)] == list(range(1, 9))
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert killed.validation_loss == undisturbed.validation_loss
    assert (other / "done").exists()
    told = [event for event in read_events(other / "events.jsonl") if event["kind"] == "restart"]
    assert {event["data"]["signal"] for event in told} == {"SIGKILL"}
    # on a busy disk nothing may be saved yet when the third start looks: it then meets no fault
    assert [event["rank"] for event in told][:2] == [1, 0]
    assert "rank 0 was ended by SIGKILL after step 5; restart 2 of at most 100" in told[1]["text"]


@pytest.mark.ranks
def test_a_crash_that_comes_again_ends_the_run_once_it_was_tried_from_further_back(
    run: Run, tmp_path: Path, injure: Injure
) -> None:
    injure(
        Fault(point="step.before", action="sleep", value=2, step=5, rank=1, attempt=None),  # saves
        Fault(point="step.before", action="exception", step=5, rank=1, attempt=None),
    )
    with pytest.raises(WorkerCrashError) as caught:
        phalanx.train(run, name="crashing", runs=tmp_path)
    said = str(caught.value)
    assert said.startswith(
        "3 restarts in a row came no further than step 5, one of them from step-00000002, a "
        "checkpoint further back; the last failure: rank 1 crashed:\nTraceback"
    )
    assert said.endswith("RuntimeError: a fault was injected at step.before")
    folder = tmp_path / "crashing"
    assert (folder / "checkpoints" / "doubted-step-00000004").exists()
    assert not (folder / "done").exists()
    events = read_events(folder / "events.jsonl")
    resumed = [event["step"] for event in events if event["kind"] == "resume"]
    assert resumed == [4, 4, 2]
    assert (events[-1]["kind"], events[-1]["step"], events[-1]["rank"]) == ("stop", 5, 1)


class Told:
    """A restarter on a folder in which a test says how far the run is."""

    def __init__(self, folder: Path, most: int = 100) -> None:
        self.directory = RunDirectory(folder)
        self.restarter = Restarter(self.directory, Recipe(max_restarts=most), EventLog(None))

    def fails_after(self, step: int, error: PhalanxError | None = None) -> bool:
        self.directory.metrics_file.write_text(json.dumps({"step": step}) + "\n")
        return self.restarter.again(error or WorkerCrashError("rank 3 was ended by SIGBUS", 3))


def test_a_run_that_gets_further_is_started_again_and_again(tmp_path: Path) -> None:
    told = Told(tmp_path)
    for step in (4, 4, 3, 5, 5, 2, 6):
        assert told.fails_after(step)


def test_a_run_that_gets_no_further_is_given_up_after_three_tries(tmp_path: Path) -> None:
    told = Told(tmp_path)
    assert all(told.fails_after(step) for step in (9, 4, 9))
    with pytest.raises(WorkerCrashError, match=r"no further than step 8; .*SIGBUS"):
        told.fails_after(8)


def test_no_more_restarts_are_made_than_were_asked_for(tmp_path: Path) -> None:
    assert not Told(tmp_path, most=0).fails_after(3)
    told = Told(tmp_path, most=2)
    assert told.fails_after(1)
    assert told.fails_after(2)
    with pytest.raises(WorkerCrashError, match=r"all 2 restarts are used up \(--max-restarts\)"):
        told.fails_after(3)


@pytest.mark.parametrize("kind", [UsageError, RefusedError, DataError, PhalanxError])
def test_what_a_user_has_to_change_is_not_tried_again(
    tmp_path: Path, kind: type[PhalanxError]
) -> None:
    assert not Told(tmp_path).fails_after(3, kind("change this"))


@pytest.mark.ranks
def test_a_run_that_is_refused_is_refused_once(run: Run, tmp_path: Path) -> None:
    narrow = replace(run, data=replace(run.data, path=str(tmp_path / "short.txt")))
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(DataError):
        phalanx.train(narrow, name="refused", runs=tmp_path)
    assert not (tmp_path / "refused").exists()
