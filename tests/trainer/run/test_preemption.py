"""Asked to stop at any time and by any signal, a run saves its last step and says 75."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.trainer.checkpoint.names import steps
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.faults.inject import PLAN
from phalanx.trainer.run.events import read_events
from phalanx.trainer.run.signals import EndedError

pytestmark = pytest.mark.ranks

SHAPE = ModelShape(layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256, tied=True)
RECIPE = Recipe(
    **{"seq": 16, "batch": 4, "steps": 1000, "warmup": 2, "evaluate_batches": 2},
    **{"evaluate_every": 3, "checkpoint_every": 2, "sample_tokens": 0},
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "book.txt").write_text("In the beginning was the word, and it was a byte.\n" * 60)
    data = Data(path=str(tmp_path / "book.txt"), validation=0.1)
    return Run(model=SHAPE, recipe=RECIPE, data=data, layout=Layout.parse("dp=2"))


@pytest.fixture
def injure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def plan(*faults: Fault) -> None:
        (tmp_path / "plan.json").write_text(FaultPlan(faults).to_json())
        monkeypatch.setenv(PLAN, str(tmp_path / "plan.json"))

    return plan


def last_saved(folder: Path) -> int:
    return steps(folder / "checkpoints")[0][0]


def last_done(folder: Path) -> int:
    return int(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"])


@pytest.mark.parametrize(
    ("point", "name"),
    [
        ("start", "SIGUSR1"),
        ("step.before_update", "SIGHUP"),
        ("save.begin", "SIGINT"),
        ("validation", "SIGTERM"),
    ],
)
def test_a_signal_to_one_rank_stops_all_and_loses_no_step(
    run: Run, tmp_path: Path, injure: Callable[..., None], point: str, name: str
) -> None:
    injure(Fault(point=point, action="signal", value=name, rank=1))
    summary = phalanx.train(run, name="a", runs=tmp_path)
    assert summary.interrupted
    assert last_saved(tmp_path / "a") == last_done(tmp_path / "a") == summary.last_step < 10
    assert not (tmp_path / "a" / "done").exists()


def test_ranks_that_cannot_save_within_the_grace_are_ended(
    run: Run, tmp_path: Path, injure: Callable[..., None]
) -> None:
    """One asks its launcher to stop, as a batch system would, and then hangs."""
    injure(
        Fault(point="save.begin", action="launcher", value="SIGTERM", rank=0, step=2),
        Fault(point="save.begin", action="sleep", value=600, rank=1, step=2),
    )
    hasty = replace(run, recipe=replace(run.recipe, grace=1.0))
    start = time.monotonic()
    with pytest.raises(EndedError, match="before anything was saved: there is nothing to resume"):
        phalanx.train(hasty, name="a", runs=tmp_path)
    assert time.monotonic() - start < 60
    (stop,) = (e for e in read_events(tmp_path / "a" / "events.jsonl") if e["kind"] == "stop")
    assert "asked to stop after step 2, which is not saved" in stop["text"]


@contextmanager
def started(folder: Path, run: Run, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """The command, once it has locked the folder of its run: no rank is there yet."""
    (folder / "run.toml").write_text(run.to_toml())
    command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--name", "a"]
    with subprocess.Popen(command, cwd=folder, **streams) as running:  # type: ignore[call-overload]
        limit = time.monotonic() + 60
        while not (folder / "runs" / "a" / ".lock").exists():
            assert time.monotonic() < limit, "it does not start"
            time.sleep(0.01)
        try:
            yield running
        finally:
            running.kill()


def test_a_run_that_is_asked_to_stop_while_it_starts_saves_a_step_also_where_nobody_reads(
    run: Run, tmp_path: Path
) -> None:
    read, write = os.pipe()
    os.close(read)  # whoever read the output is gone
    with started(tmp_path, run, stdout=write, stderr=write) as running:
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=120) == 75
    os.close(write)
    folder = tmp_path / "runs" / "a"
    assert last_saved(folder) == last_done(folder)


def test_nothing_can_be_resumed_where_nothing_was_saved(
    run: Run, tmp_path: Path, injure: Callable[..., None]
) -> None:
    injure(Fault(point="start", action="sleep", value=600))  # if the ranks are there by then
    with started(tmp_path, run, stderr=subprocess.PIPE) as running:
        running.send_signal(signal.SIGINT)
        time.sleep(0.7)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
        assert (running.returncode, b"there is nothing to resume" in said) == (1, True)
