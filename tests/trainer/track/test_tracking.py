"""Trackers follow a run and never hold it up; a resumed run is one curve."""

import json
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from phalanx.core.run import Run
from phalanx.core.track import Track
from phalanx.trainer.track import tracking
from phalanx.trainer.track.tracking import Feed, TrackedRun, Values, config_of

RUN = """
layout = "dp=1"
[model]
layers = 2
hidden = 32
heads = 2
[recipe]
seq = 32
batch = 4
steps = 9
stop_at = {stop_at}
warmup = 2
checkpoint_every = 3
evaluate_batches = 1
sample_tokens = 0
[track]
to = "{to}"
project = "tests"
"""
INSTALLED = [name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name)]


def place(folder: Path) -> TrackedRun:
    return TrackedRun("a", "tests", folder, 0, {})


class Notebook:
    """A tracker that writes down what it is given, as slowly as it is told to."""

    def __init__(self, may_go_on: threading.Event | None = None) -> None:
        self.points: list[tuple[int, Values]] = []
        self.may_go_on, self.closed = may_go_on, False

    def add(self, step: int, values: Values, when: float) -> None:
        if self.may_go_on is not None:
            self.may_go_on.wait(60)
        self.points.append((step, values))

    def close(self) -> None:
        self.closed = True


def install(monkeypatch: pytest.MonkeyPatch, tracker: object, name: str = "notebook") -> None:
    """Have a feed of that name open this tracker."""
    module = ModuleType(name)

    def open_tracker(place: TrackedRun) -> object:
        if isinstance(tracker, BaseException):
            raise tracker
        return tracker

    module.open_tracker = open_tracker  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, f"phalanx.trainer.track.{name}", module)


def test_every_point_arrives_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    notebook, told = Notebook(), []
    install(monkeypatch, notebook)
    feed = Feed("notebook", place(tmp_path), told.append)
    for step in range(100):
        feed.add(tracking._Point(step, {"loss": 1.0}, 0.0))
    feed.end()
    feed.join(time.monotonic() + 30)
    assert [step for step, _ in notebook.points] == list(range(100))
    assert notebook.closed
    assert told == []


def test_a_tracker_that_hangs_costs_its_oldest_points_and_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(tracking, "MOST_WAITING", 5)
    gate, told = threading.Event(), []
    notebook = Notebook(gate)
    install(monkeypatch, notebook)
    feed = Feed("notebook", place(tmp_path), told.append)
    for step in range(50):
        feed.add(tracking._Point(step, {}, 0.0))
    feed.end()
    feed.join(time.monotonic())
    assert len(told) == 1
    assert "notebook is slow; it lacks" in told[0]
    gate.set()
    feed._thread.join(30)
    assert [step for step, _ in notebook.points][-3:] == [47, 48, 49]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ModuleNotFoundError("no", name="notes"),
            "track: notebook needs notes, which is not installed: pip install 'phalanx[notebook]'; "
            "training goes on without it",
        ),
        (
            ConnectionError("http://me:hunter2@host/ is\nnot there"),
            "track: notebook has failed: http://me:***@host/ is not there; training goes on "
            "without it",
        ),
        (SystemExit(3), "track: notebook has failed: 3; training goes on without it"),
    ],
)
def test_a_tracker_that_is_down_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, line: str
):
    told: list[str] = []
    install(monkeypatch, error)
    feed = Feed("notebook", place(tmp_path), told.append)
    feed._thread.join(30)
    for step in range(20_000):
        feed.add(tracking._Point(step, {}, 0.0))
    feed.end()
    feed.join(time.monotonic() + 1)
    assert told == [line]


def test_no_secret_of_a_run_reaches_a_tracker():
    run = Run.from_tables({"data": {"path": "https://me:hunter2@host/a.txt?token=canary"}})
    config = config_of(run)
    assert "hunter2" not in str(config)
    assert "canary" not in str(config)
    assert config["recipe.steps"] == "100"


def test_a_tracker_that_nobody_knows_is_refused():
    with pytest.raises(Exception, match="it can be tensorboard, wandb, mlflow, aim, joined by"):
        Track(to="tensorbord")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after step 5, and resumed."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "book.txt").write_text("It was a dark and stormy night. " * 100)
    (folder / "run.toml").write_text(RUN.format(stop_at=5, to="+".join(INSTALLED)))
    train = [sys.executable, "-m", "phalanx", "train", "--data", "book.txt", "--quiet"]
    for words in (["run.toml", "--name", "a"], ["--resume", "auto", "--set", "recipe.stop_at=9"]):
        subprocess.run([*train, *words], cwd=folder, check=True, timeout=500)
    return folder / "runs" / "a"


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.ranks
def test_tensorboard_shows_a_resumed_run_as_one_curve(resumed: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(resumed / "track" / "tensorboard"))
    events.Reload()
    shown = {point.step: point.value for point in events.Scalars("loss")}
    assert [point.step for point in events.Scalars("loss")] == list(range(1, 10))
    assert shown == pytest.approx(losses(resumed), rel=1e-6)


@pytest.mark.ranks
def test_mlflow_shows_a_resumed_run_as_one_curve(resumed: Path, monkeypatch: pytest.MonkeyPatch):
    MlflowClient = pytest.importorskip("mlflow.tracking").MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((resumed / "track" / "mlflow").as_uri())
    run = (resumed / "track" / "mlflow-run").read_text()
    history = client.get_metric_history(run, "loss")
    assert {point.step: point.value for point in history} == losses(resumed)
    assert len(history) == 9
    assert client.get_run(run).info.status == "FINISHED"
    assert client.get_run(run).data.params["recipe.batch"] == "4"


@pytest.mark.ranks
def test_both_parts_of_a_run_have_one_id_at_weights_and_biases(resumed: Path):
    pytest.importorskip("wandb")
    (name,) = {path.name.rpartition("-")[2] for path in resumed.glob("track/wandb/offline-run-*")}
    assert name == (resumed / "track" / "wandb-id").read_text()
    assert len(list(resumed.glob("track/wandb/offline-run-*/*.wandb"))) == 2
