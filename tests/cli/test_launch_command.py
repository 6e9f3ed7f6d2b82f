import copy
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from toy_slurm import missing, toy_slurm

from phalanx.cli.main import main

RUN = """
layout = "dp=2 tp=2"
[model]
layers = 2
hidden = 32
heads = 2
[recipe]
seq = 32
batch = 4
steps = 300
stop_at = {steps}
warmup = 2
checkpoint_every = 3
evaluate_batches = 1
sample_tokens = 4
"""
SCHEMA = Path(__file__).parent / "data" / "jobset-v1alpha2.json"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.format(steps=20))
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 100)
    return tmp_path


def script(capsys: Captured, *words: str) -> str:
    assert main(["launch", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_batch_script_asks_for_what_the_run_needs(here: Path, capsys: Captured):
    options = ["--time", "12:00:00", "--partition", "gpu", "--sbatch", "constraint=h100"]
    text = script(capsys, "slurm", "run.toml", "--nodes", "2", *options, "--name", "big")
    asked = {line.partition(" --")[2] for line in text.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {"nodes=2", "ntasks-per-node=1", "gpus-per-node=2", "time=12:00:00"}
    assert asked >= {"signal=USR1@300", "requeue", "open-mode=append", "output=%x-%j.out"}
    assert asked >= {"job-name=big", "partition=gpu", "constraint=h100"}
    assert "--nodes 2" in text.partition("srun")[2]
    checked = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["slurm", "run.toml", "--nodes", "3"], 3, "it can be 1, 2, 4"),
        (["slurm", "run.toml", "--nodes", "0"], 2, "at least 1"),
        (["slurm", "run.toml", "--nodes", "2", "--time", "soon"], 2, "--time"),
        (["slurm", "run.toml", "--nodes", "2", "--partition", "a b; rm -rf /"], 2, "partition"),
        (["slurm", "run.toml", "--nodes", "2", "--sbatch", "x\n"], 2, "sbatch cannot read"),
        (["slurm", "run.toml", "--nodes", "2", "--image", "a"], 2, "goes with launch k8s"),
        (["slurm", "run.toml", "--nodes", "2", "--warning", "5"], 2, "at least 60"),
        (["slurm", "gone.toml", "--nodes", "2"], 2, "gone.toml"),
        (["k8s", "run.toml", "--nodes", "2", "--volume", "runs"], 2, "--image"),
        (["k8s", "run.toml", "--nodes", "2", "--image", "a", "--volume", "Runs!"], 2, "--volume"),
        (["k8s", "run.toml", "--nodes", "2", "--time", "9"], 2, "goes with launch slurm"),
    ],
)
def test_what_no_cluster_would_take_is_refused_in_a_line(
    here: Path, capsys: Captured, words: list[str], code: int, told: str
):
    assert main(["launch", *words]) == code
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_what_is_no_cluster_cannot_be_submitted_to(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "slurm", "run.toml", "--nodes", "2", "--submit"]) == 1
    assert "sbatch is not installed here; submit run.sbatch where it is" in capsys.readouterr().err
    assert (here / "run.sbatch").exists()


def test_words_reach_the_run_as_they_were_given(here: Path, capsys: Captured):
    text = script(capsys, "slurm", "run.toml", "--nodes", "1", "--set", "data.path=a b's $(x).txt")
    assert """--set 'data.path=a b'"'"'s $(x).txt'""" in text


def strict(schema: Any) -> Any:
    """The same schema, refusing every key that it does not name, as kubectl does."""
    found = copy.deepcopy(schema)
    todo = [found]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            if isinstance(one.get("properties"), dict) and one.get("type") == "object":
                one.setdefault("additionalProperties", False)
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return found


def manifest(capsys: Captured, *words: str) -> Any:
    return yaml.safe_load(script(capsys, "k8s", "run.toml", "--nodes", "2", *words))


def test_a_jobset_is_what_its_schema_wants(here: Path, capsys: Captured):
    found = manifest(capsys, "--image", "registry/phalanx:1", "--volume", "runs")
    schema = strict(json.loads(SCHEMA.read_text(encoding="utf-8")))
    jsonschema.validate(found, schema)
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["completion"] = 2
    with pytest.raises(jsonschema.ValidationError, match="completion"):
        jsonschema.validate(found, schema)


def test_a_jobset_starts_one_launcher_per_machine(here: Path, capsys: Captured):
    found = manifest(capsys, "--image", "a:1", "--volume", "runs", "--namespace", "team")
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    words = container["command"]
    assert (job["completions"], job["completionMode"]) == (2, "Indexed")
    assert words[words.index("--rendezvous") + 1] == "run-node-0-0.run:29400"
    assert words[words.index("--nodes") + 1] == "2"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert found["metadata"] == {"name": "run", "namespace": "team"}
    on_75 = job["podFailurePolicy"]["rules"][0]
    assert (on_75["action"], on_75["onExitCodes"]["values"]) == ("Ignore", [75])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes."""
    why = missing()
    if why:
        pytest.skip(why)
    with toy_slurm(tmp_path_factory.mktemp("slurm") / "d") as environ:
        yield environ


class Cluster:
    """What a person at a terminal of the cluster does."""

    def __init__(self, environ: dict[str, str], folder: Path) -> None:
        self.environ, self.folder = environ, folder

    def do(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environ, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def launch(self, *words: str) -> str:
        command = [sys.executable, "-m", "phalanx", "launch", "slurm", "run.toml", "--nodes", "2"]
        more = ["--cpu", "--setup", "export OMP_NUM_THREADS=1", "--set", "data.path=book.txt"]
        told = self.do(*command, *more, *words, "--submit", "--json")
        return str(json.loads(told)["job"])

    def state(self, job: str) -> str:
        return self.do("squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T")

    def await_state(self, job: str, *states: str, seconds: float = 500) -> None:
        deadline = time.monotonic() + seconds
        while self.state(job) not in states:
            assert time.monotonic() < deadline, f"{self.state(job)}: {self.told()}"
            time.sleep(0.3)

    def await_text(self, path: str, text: str, seconds: float = 500) -> None:
        deadline = time.monotonic() + seconds
        file = self.folder / path
        while not (file.exists() and text in file.read_text()):
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.2)

    def told(self) -> str:
        """The logs of all jobs."""
        return "\n".join(path.read_text() for path in self.folder.glob("*.out"))


@pytest.fixture
def cluster(slurm: dict[str, str], here: Path) -> Cluster:
    """That Slurm, for a run of this test."""
    return Cluster(slurm, here)


def losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.ranks
def test_a_job_that_is_asked_to_save_is_queued_again_and_ends_at_the_same_bits(cluster: Cluster):
    (cluster.folder / "run.toml").write_text(RUN.format(steps=60))
    job = cluster.launch("--name", "a")
    cluster.await_text("runs/a/metrics.jsonl", '"step": 4,')
    cluster.do("scancel", "--signal=USR1", job)
    cluster.await_state(job, "PENDING")
    assert 4 <= losses(cluster.folder / "runs" / "a")[-1][0] < 60
    cluster.do("scontrol", "update", f"JobId={job}", "StartTime=now")
    cluster.await_state(job, "COMPLETED")
    cluster.await_text("runs/a/events.jsonl", '"kind": "resume"')
    whole = ["train", "run.toml", "--data", "book.txt", "--name", "b", "--quiet"]
    cluster.do(sys.executable, "-m", "phalanx", *whole)
    assert losses(cluster.folder / "runs" / "a") == losses(cluster.folder / "runs" / "b")
    both = [f"runs/{run}/checkpoints/step-00000060" for run in "ab"]
    same = ["checkpoints", "runs/a", "--diff", *both]
    cluster.do(sys.executable, "-m", "phalanx", *same)


@pytest.mark.ranks
def test_a_job_that_somebody_cancels_is_saved_and_stays_cancelled(cluster: Cluster):
    (cluster.folder / "run.toml").write_text(RUN.format(steps=300))
    job = cluster.launch("--name", "c")
    cluster.await_text("runs/c/metrics.jsonl", '"step": 4,')
    cluster.do("scancel", job)
    cluster.await_state(job, "CANCELLED")
    assert (cluster.folder / "runs" / "c" / "summary.json").exists()
    assert "asked to stop" in (cluster.folder / "runs" / "c" / "events.jsonl").read_text()


@pytest.mark.sweep
@pytest.mark.ranks
def test_the_time_limit_asks_the_run_to_save_in_time(cluster: Cluster):
    (cluster.folder / "run.toml").write_text(
        RUN.format(steps=90000).replace("steps = 300", "steps = 90000")
    )
    job = cluster.launch("--name", "d", "--time", "2", "--warning", "60")
    cluster.await_state(job, "PENDING")
    assert "DUE TO TIME LIMIT" not in cluster.told()
    assert list((cluster.folder / "runs" / "d" / "checkpoints").glob("step-*"))
    cluster.do("scancel", job)
