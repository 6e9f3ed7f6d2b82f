"""Who does nothing any more is named, and nobody is who only takes his time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.trainer.run import watch as watching
from phalanx.trainer.run.heartbeat import Heartbeat, Pulse, read_pulse
from phalanx.trainer.run.watch import Watch, blame, state


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def pulse(rank: int, **facts: object) -> Pulse:
    usual = {"beats": 9, "time": 1.0, "limit": 5.0, "step": 12, "pid": os.getpid()}
    rest = {"phase": "train", "doing": "", "message": ""}
    return Pulse(rank, **{**usual, **rest, **facts})  # type: ignore[arg-type]


def test_a_stopped_rank_is_named_and_what_the_others_wait_for(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    while state(sleeper.pid) != "T":
        time.sleep(0.01)
    wait = "'gradients' along data"
    pulses = [pulse(0, message=wait), pulse(1, pid=sleeper.pid, doing="0B3", message=wait)]
    error = blame(pulses, 6.0, tmp_path)
    said = "rank 1 is stopped (step 12, 0B3) for 6.0 s; rank 0 waits for 'gradients' along data"
    assert (str(error), error.rank, error.stalled) == (said, 1, 6.0)


def test_a_rank_that_waits_for_nobody_is_named_before_those_that_do(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 2)  # of this process, so that there is a stack
    heart.step(12, 0.01)
    mine = read_pulse(tmp_path, 2)
    assert mine is not None
    error = blame([pulse(0, message="'loss' along world"), mine], 5.5, tmp_path)
    heart.close()
    assert error.rank == 2
    first, *stack = str(error).splitlines()
    assert "(phalanx/trainer/run/watch.py:" in first
    assert any("test_a_rank_that_waits_for_nobody" in line for line in stack)


@pytest.mark.parametrize(
    ("messages", "culprit"),
    [
        (["'gradients' along data"] * 3 + ["'norm' along world"], 3),
        (["'norm' along world", *["'gradients' along data"] * 3], 0),
    ],
)
def test_where_all_wait_it_is_who_waits_for_what_nobody_else_does(
    tmp_path: Path, messages: list[str], culprit: int
) -> None:
    pulses = [pulse(rank, message=message) for rank, message in enumerate(messages)]
    error = blame(pulses, 5.5, tmp_path)
    assert error.rank == culprit
    assert f"waits for {messages[culprit]}, which nobody sends" in str(error)


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(watching.time, "monotonic", lambda: self.now)

    def looks(self, watch: Watch, seconds: float, every: float = 0.5) -> bool:
        """Look again and again for so long; whether somebody was found to hang."""
        for _ in range(int(seconds / every)):
            self.now += every
            if watch.look() is not None:
                return True
        return False


@pytest.fixture
def hearts(tmp_path: Path) -> Iterator[list[Heartbeat]]:
    both = [Heartbeat(tmp_path, rank) for rank in range(2)]
    for heart in both:
        heart.step(3, 0.2)
    yield both
    for heart in both:
        heart.close()


def test_nobody_hangs_while_anybody_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hearts: list[Heartbeat]
) -> None:
    clock, watch = Clock(monkeypatch), Watch(tmp_path, range(2))
    for _ in range(10):
        assert not clock.looks(watch, 4.0)
        hearts[0].doing("0F1")
    assert clock.looks(watch, 6.0)


def test_slow_work_of_one_rank_keeps_the_others_from_being_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hearts: list[Heartbeat]
) -> None:
    clock, watch = Clock(monkeypatch), Watch(tmp_path, range(2))
    hearts[1].phase("checkpoints", 60.0)
    assert not clock.looks(watch, 59.0)
    assert clock.looks(watch, 3.0)


def test_time_in_which_nobody_looked_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hearts: list[Heartbeat]
) -> None:
    """A machine that slept for an hour, or a job that was suspended with Ctrl-Z."""
    clock, watch = Clock(monkeypatch), Watch(tmp_path, range(2))
    watch.look()
    clock.now += 3600
    assert not clock.looks(watch, 2.0)


def test_ranks_that_are_not_all_there_yet_do_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hearts: list[Heartbeat]
) -> None:
    assert not Clock(monkeypatch).looks(Watch(tmp_path, range(3)), 600.0)


def test_ranks_that_start_and_compute_nothing_hang_and_those_that_compute_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hearts = [Heartbeat(tmp_path, rank) for rank in range(2)]
    spent = {"now": 0.0}
    monkeypatch.setattr(watching, "state", lambda pid: "S")
    monkeypatch.setattr(watching, "cpu_seconds", lambda pid: spent["now"])
    clock, watch = Clock(monkeypatch), Watch(tmp_path, range(2))
    for _ in range(6):  # some work now and then
        assert not clock.looks(watch, 100.0)
        spent["now"] += 5.0
    assert not clock.looks(Watch(tmp_path, range(2), alone=False), 600.0)
    assert clock.looks(watch, 150.0)
    for heart in hearts:
        heart.close()


def test_what_a_process_has_computed_is_seen() -> None:
    before = watching.cpu_seconds(os.getpid())
    sum(i * i for i in range(2_000_000))
    assert watching.cpu_seconds(os.getpid()) > before
    assert watching.cpu_seconds(2**30) == 0.0
