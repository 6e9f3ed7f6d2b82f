"""Under torchrun a run goes on by itself, with nothing to set, and never without its agent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.faults.inject import PLAN
from phalanx.trainer.run.events import read_events

RUN = """
layout = "dp=2"
[model]
layers = 2
hidden = 32
heads = 2
[recipe]
seq = 16
batch = 4
steps = 100000
warmup = 2
checkpoint_every = 5
sample_tokens = 0
"""
FAULTS = [
    Fault(point="step.before_update", action="signal", value="SIGKILL", step=12, rank=0, attempt=0),
    Fault(point="step.after", action="signal", value="SIGSTOP", step=17, rank=1, attempt=1),
]
ANOTHER = Fault(point="step.after", action="signal", value="SIGKILL", step=22, rank=1, attempt=2)


def wait_for(happened: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.1)


def steps_of(folder: Path) -> list[tuple[int, float]]:
    """Of the one run in a folder of runs: steps and losses, whole lines only."""
    lines = []
    for file in folder.glob("*/metrics.jsonl"):
        lines += [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "faults"),
    [
        (["--standalone"], FAULTS),
        pytest.param(
            ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
            [*FAULTS, ANOTHER],
            marks=pytest.mark.sweep,
        ),
        pytest.param(["--master-port=29471"], [*FAULTS, ANOTHER], marks=pytest.mark.sweep),
    ],
)
def test_a_run_under_torchrun_goes_on_by_itself_and_dies_with_its_agent(
    tmp_path: Path, how: list[str], faults: list[Fault]
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 100)
    (tmp_path / "plan.json").write_text(FaultPlan(tuple(faults)).to_json())
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "torch.distributed.run", *how, "--nproc-per-node=2"]
    command += ["--max-restarts=3", "-m", "phalanx", "train", "run.toml", "--data", "book.txt"]
    with subprocess.Popen(
        [*command, "--quiet"],
        cwd=tmp_path,
        env={**os.environ, PLAN: str(tmp_path / "plan.json")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as agent:
        try:
            wait_for(lambda: len(steps_of(runs)) > 25, seconds=240)
            (run,) = runs.iterdir()
            ranks = [int(word) for word in children_of(agent.pid)]
            assert len(ranks) == 2
            agent.send_signal(signal.SIGKILL)
            wait_for(lambda: not any(alive(pid) for pid in ranks), seconds=2)
        finally:
            agent.kill()
    resumed = [
        event["step"] for event in read_events(run / "events.jsonl") if event["kind"] == "resume"
    ]
    assert len(resumed) == len(faults)
    assert all(step >= 5 for step in resumed)
    steps = [step for step, _ in steps_of(runs)]
    assert steps == list(range(1, len(steps) + 1))
    assert not (run / "done").exists()


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
