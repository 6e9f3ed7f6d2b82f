"""Several launchers of one run start and end together, and come to the bits of one launcher."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = """
layout = "dp=2 tp=2"
[model]
layers = 2
hidden = 32
heads = 2
[recipe]
seq = 32
batch = 4
steps = 14
warmup = 2
checkpoint_every = 3
evaluate_batches = 1
sample_tokens = 4
"""
PHALANX = (sys.executable, "-m", "phalanx")


class Machines:
    """Two launchers, as if each were on a machine of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "run.toml").write_text(RUN)
        (folder / "book.txt").write_text("It was a dark and stormy night. " * 100)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.meet = f"127.0.0.1:{free.getsockname()[1]}"
        self.launchers: list[subprocess.Popen[str]] = []

    def start(self, *words: str, last: tuple[str, ...] = ()) -> None:
        """Start both; machine 1 first, which has to wait.

        Args:
            words: of both command lines.
            last: of that of machine 1 alone.
        """
        for number in (1, 0):
            where = ["--nodes", "2", "--node-rank", str(number), "--rendezvous", self.meet]
            more = [*words, *(last if number == 1 else ())]
            with (self.folder / f"log-{number}").open("w") as log:
                launcher = subprocess.Popen(
                    [*PHALANX, "train", "run.toml", "--name", "a", *where, *more],
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                    text=True,
                )
            self.launchers.insert(0, launcher)

    def await_step(self, step: int) -> None:
        """Return once that step is in the metrics."""
        deadline = time.monotonic() + 500
        while step not in self.steps():
            assert time.monotonic() < deadline, self.told()
            assert all(one.poll() is None for one in self.launchers), self.told()
            time.sleep(0.05)

    def codes(self) -> list[int]:
        """The exit codes, of machine 0 first."""
        return [launcher.wait(500) for launcher in self.launchers]

    def steps(self) -> list[int]:
        """Of the metrics."""
        file = self.folder / "runs" / "a" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def told(self) -> str:
        """Both logs."""
        return "\n".join((self.folder / f"log-{number}").read_text() for number in (0, 1))


def ranks_of(launcher: int) -> list[int]:
    """The ranks below a launcher: the children of the clean process that it forks them from."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    children = [pid for pid, parent in parents.items() if parent == launcher]
    return [pid for pid, parent in parents.items() if parent in children]


def compare(folder: Path, first: str, second: str) -> subprocess.CompletedProcess[str]:
    at = "checkpoints/step-00000014"
    both = [f"runs/{run}/{at}" for run in (first, second)]
    command = [*PHALANX, "checkpoints", f"runs/{first}", "--diff", *both]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def machines(tmp_path: Path):
    """Two of them, none left behind."""
    found = Machines(tmp_path)
    yield found
    for launcher in found.launchers:
        launcher.kill()
        launcher.wait()


@pytest.mark.ranks
def test_a_rank_that_dies_on_one_machine_is_started_again_with_all_others(machines: Machines):
    machines.start("--data", "book.txt")
    machines.await_step(5)
    os.kill(ranks_of(machines.launchers[1].pid)[0], signal.SIGKILL)
    assert machines.codes() == [0, 0], machines.told()
    assert machines.steps() == list(range(1, 15))
    events = (machines.folder / "runs" / "a" / "events.jsonl").read_text()
    assert "machine 1: rank " in events
    assert "SIGKILL" in events
    alone = [*PHALANX, "train", "run.toml", "--data", "book.txt", "--name", "b", "--quiet"]
    subprocess.run(alone, cwd=machines.folder, check=True)
    done = compare(machines.folder, "a", "b")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ranks
def test_a_signal_to_one_machine_has_all_save(machines: Machines):
    machines.start("--data", "book.txt", "--set", "recipe.steps=2000")
    machines.await_step(2)
    machines.launchers[1].send_signal(signal.SIGUSR1)
    assert machines.codes() == [75, 75], machines.told()
    assert list((machines.folder / "runs" / "a" / "checkpoints").glob("step-*"))


@pytest.mark.ranks
def test_what_is_missing_on_one_machine_ends_all_in_a_line(machines: Machines):
    (machines.folder / "bad.bin").write_bytes(bytes(64))
    machines.start(last=("--data", "bad.bin"))
    code, other = machines.codes()
    assert code == other != 0, machines.told()
    assert "error: machine 1: " in (machines.folder / "log-0").read_text()
    assert "bad.bin" in (machines.folder / "log-0").read_text()
