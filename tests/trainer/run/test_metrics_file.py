"""Metrics are written whole, now or later, and a full disk does not end a run."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.trainer.run.metrics_file import MOST_KEPT_BYTES, MetricsFile
from phalanx.trainer.run.report import StepMetrics, Validation
from phalanx.trainer.run.rundir import RunDirectory


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        steps=10,
        loss=2.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=4096,
        seconds=0.5,
        tokens_per_second=8192.0,
        flops_per_second=1e9,
    )


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_what_finds_no_room_is_told_once_and_written_when_there_is(tmp_path: Path) -> None:
    path, told = tmp_path / "metrics.jsonl", []
    file = MetricsFile(path, told.append)
    file.add(metrics(1))
    path.rename(tmp_path / "kept")
    path.symlink_to("/dev/full")
    for step in (2, 3):
        file.add(metrics(step))
    assert len(told) == 1
    assert "metrics.jsonl: No space left on device; training goes on" in told[0]
    path.unlink()
    (tmp_path / "kept").rename(path)
    file.add(metrics(4))
    assert steps(path) == [1, 2, 3, 4]
    assert told[1].endswith("metrics.jsonl is written again")


def limited(folder: Path) -> None:
    """In a process of its own: no file may grow beyond what two lines and a half need."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path, told = folder / "metrics.jsonl", []
    file = MetricsFile(path, told.append)
    file.add(metrics(1))
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 5 // 2, resource.RLIM_INFINITY))
    for step in (2, 3, 4):
        file.add(metrics(step))
        assert steps(path) == [1, 2]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2, resource.RLIM_INFINITY))
    with pytest.raises(PhalanxError, match="File too large"):
        RunDirectory(folder).write_validation(Validation(2, 1.23456789, 0.123456789))
    assert steps(path) == [1, 2]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    file.add(metrics(5))
    assert steps(path) == [1, 2, 3, 4, 5]
    assert len(told) == 2


def test_no_line_is_torn_where_the_disk_takes_half_of_it(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_memory_has_no_room_for_is_told_as_lost(tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / "later"
    file = MetricsFile(folder / "metrics.jsonl", told.append)
    line = len(json.dumps(metrics(1).to_json())) + 1
    last = MOST_KEPT_BYTES // line + 100
    for step in range(1, last):
        file.add(metrics(step))
    folder.mkdir()
    file.add(metrics(last))
    kept = steps(folder / "metrics.jsonl")
    assert kept == list(range(last - len(kept) + 1, last + 1))
    assert told[1].endswith(f"but for {last - len(kept)} steps, which are lost")


def test_steps_that_are_done_again_are_not_written_twice(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    file = MetricsFile(folder / "metrics.jsonl", lambda _: None)
    for step in (1, 2, 3):
        file.add(metrics(step))
    file.forget_after(1)
    folder.mkdir()
    file.add(metrics(2))
    assert steps(folder / "metrics.jsonl") == [1, 2]


def test_what_cannot_be_amended_is_told_and_not_raised(tmp_path: Path) -> None:
    told: list[str] = []

    def fail() -> None:
        raise PhalanxError(f"cannot write: {os.strerror(errno.EIO)}")

    MetricsFile(tmp_path / "metrics.jsonl", told.append).amend(fail)
    assert told == [
        "cannot write: Input/output error; training goes on, and metrics are written once there is "
        "room"
    ]


if __name__ == "__main__":
    limited(Path(sys.argv[1]))
