import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.api.runfile import load_run
from phalanx.cli.main import main
from phalanx.core.layout import Layout

RUN = """
layout = "pp=2"
[model]
layers = 2
hidden = 32
heads = 2
[recipe]
seq = 32
batch = 4
steps = 8
stop_at = 5
warmup = 2
checkpoint_every = 3
evaluate_batches = 1
sample_tokens = 4
"""

WEIGHTS = Path(__file__).parents[1] / "trainer" / "model" / "data" / "qwen3"
Done = subprocess.CompletedProcess[str]
Captured = pytest.CaptureFixture[str]


def phalanx(folder: Path, *words: str) -> list[str]:
    """The command line of a run in `folder`, which has a run file and a text."""
    (folder / "run.toml").write_text(RUN)
    (folder / "book.txt").write_text("It was a dark and stormy night. " * 100)
    return [sys.executable, "-m", "phalanx", "train", "run.toml", "--data", "book.txt", *words]


def finish(folder: Path, command: list[str]) -> Done:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, finish(folder, phalanx(folder, "--name", "a", "--json"))


@pytest.fixture
def copied(trained: tuple[Path, Done], tmp_path: Path) -> Path:
    """A folder with a finished run in it that a test may change."""
    return Path(shutil.copytree(trained[0], tmp_path / "copy"))


@pytest.mark.ranks
def test_a_run_writes_what_the_contract_lists(trained: tuple[Path, Done]) -> None:
    folder, done = trained
    run = folder / "runs" / "a"
    assert done.returncode == 0, done.stderr
    files = {".fence", ".lock", "done", "env.json", "events.jsonl", "metrics.jsonl", "run.toml"}
    files |= {"checkpoints", "ranks.jsonl", "summary.json", "timeline.json"}
    assert {path.name for path in run.iterdir()} == files
    assert steps(run) == [1, 2, 3, 4, 5]
    assert load_run(run / "run.toml").layout == Layout(pp=2)
    assert json.loads((run / "env.json").read_text())["ranks"] == 2
    assert [p.name for p in sorted((run / "checkpoints").iterdir())][-1] == "step-00000005"


@pytest.mark.ranks
def test_json_is_the_summary_and_nothing_else(trained: tuple[Path, Done]) -> None:
    folder, done = trained
    document = json.loads(done.stdout)
    assert document == json.loads((folder / "runs" / "a" / "summary.json").read_text())
    assert (document["schema"], document["last_step"], document["interrupted"]) == (1, 5, False)
    assert document["last_loss"] < document["first_loss"]


@pytest.mark.ranks
def test_no_warning_reaches_the_screen(trained: tuple[Path, Done]) -> None:
    shown = trained[1].stderr
    assert "step 5/5  loss" in shown
    assert not re.search("warn|traceback|error", shown, re.IGNORECASE)


@pytest.mark.ranks
def test_a_run_goes_on_under_another_layout_with_nothing_but_resume(copied: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "train", "--resume", "auto"]
    done = finish(copied, [*command, "--layout", "tp=2", "--set", "recipe.stop_at=7"])
    assert done.returncode == 0, done.stderr
    run = copied / "runs" / "a"
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]
    assert load_run(run / "run.toml").layout == Layout(tp=2)
    assert "after step 5 of 7" in done.stdout


@pytest.mark.ranks
def test_a_checkpoint_can_start_a_new_run(copied: Path) -> None:
    start = str(next((copied / "runs" / "a" / "checkpoints").glob("step-*3")))
    command = phalanx(copied, "--resume", start, "--name", "b", "--layout", "dp=1", "--quiet")
    done = finish(copied, command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert steps(copied / "runs" / "b") == [4, 5]
    assert steps(copied / "runs" / "a") == [1, 2, 3, 4, 5]


@pytest.mark.ranks
def test_sigterm_saves_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    long = ("--set", "recipe.steps=100000", "--set", "recipe.stop_at=0", "--name", "a")
    command = phalanx(tmp_path, *long, "--quiet")
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        limit = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < limit, "no step was taken"
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 75
    done = len(steps(tmp_path / "runs" / "a"))
    more = ("--resume", "auto", "--layout", "dp=1", "--set", f"recipe.stop_at={done + 1}")
    assert finish(tmp_path, phalanx(tmp_path, *long, "--quiet", *more)).returncode == 0
    assert steps(tmp_path / "runs" / "a") == list(range(1, done + 2))


@pytest.mark.ranks
def test_the_same_command_runs_under_torchrun(tmp_path: Path) -> None:
    """Two ranks that somebody else started; rank 0 alone speaks."""
    train = phalanx(tmp_path, "--name", "a", "--json")[1:]
    done = finish(
        tmp_path, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *train]
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layout"].startswith("dp=1 pp=2 tp=1")
    assert steps(tmp_path / "runs" / "a") == [1, 2, 3, 4, 5]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    phalanx(tmp_path)
    (tmp_path / "deep.toml").write_text(f"x = {'[' * 10_000}{']' * 10_000}")
    (tmp_path / "long.toml").write_text(f"x = {'9' * 5_000}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(capsys: Captured) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return err


def refused(capsys: Captured, code: int, *words: str) -> str:
    """A run that must be refused before anything is started or written."""
    before = sorted(Path().rglob("*"))
    assert main(("train", *words)) == code
    err = read(capsys)
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert sorted(Path().rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("run.toml", "--layout", "tp=3"), 3, "tp can be 1, 2"),
        (("run.toml", "--layout", "pp=3"), 3, "at most 2"),
        (("run.toml", "--layout", "dp=3"), 3, "the batch can be 3 or 6"),
        (("run.toml", "--layout", "ep=2"), 3, "ep=1"),
        (("run.toml", "--layout", "tp=2 tp=2"), 2, "twice"),
        (("run.toml", "--ranks", "3"), 3, "not for 3"),
        (("run.toml", "--set", "model.hiden=3"), 2, "did you mean hidden"),
        (("urn.toml",), 2, "did you mean run.toml"),
        (("run.toml", "--data", "bok.txt"), 2, "does not exist"),
        (
            ("run.toml", "--data", "book.txt", "--set", "recipe.seq=4000"),
            1,
            "recipe.seq of at most",
        ),
        (("run.toml", "--name", "a/b"), 2, "--runs-dir"),
        (("--resume", "auto"), 2, "leave out --resume"),
        (("--resume", "nowhere"), 2, "no such folder"),
        (("--from", "nowhere"), 2, "no such folder"),
        (("--from", ".", "--resume", "auto"), 2, "give only one of them"),
        (("run.toml", "--force"), 2, "goes with --resume"),
        (("run.toml", "--data", "book.txt", "--data", "book.txt"), 2, "--data is given twice"),
        (("run.toml", "--set", "recipe.lr=0.1"), 2, "did you mean learning_rate"),
        (("run.toml", "--name", "a:b"), 2, "of one folder"),
        (("run.toml", "--data", "bad\udcff.txt"), 2, "not text in UTF-8"),
        (("deep.toml",), 2, "not a run file in TOML"),
        (("long.toml",), 2, "not a run file in TOML"),
        (("--set", "model.layers=1000000000000"), 3, "of memory"),
        (("run.toml", "--data", "https://u:hunter2@host/x?token=hunter2"), 2, "u:***@host/x"),
        (("run.toml", "--set", "recipe.batch=99999999999999"), 3, "a smaller recipe.batch"),
        (("--set", "model.name=deepseek-v3", "--layout", "dp=1"), 3, "TiB of memory"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    here: Path, capsys: Captured, words: tuple[str, ...], code: int, hint: str
) -> None:
    said = refused(capsys, code, *words)
    assert hint in said
    assert "hunter2" not in said


@pytest.mark.parametrize("limit", [16, 24])
def test_too_few_open_files_are_told_with_what_is_needed(tmp_path: Path, limit: int) -> None:
    command = shlex.join(phalanx(tmp_path, "--quiet"))
    limited = ["sh", "-c", f"ulimit -n {limit}; exec {command}"]
    done = finish(tmp_path, limited)
    assert done.returncode == 3
    assert f"may open {limit} files here (ulimit -n)" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_of_the_same_name_is_refused(here: Path, capsys: Captured) -> None:
    (here / "runs" / "a").mkdir(parents=True)
    for name in ("run.toml", ".lock"):
        (here / "runs" / "a" / name).write_text(RUN)
    assert "--resume auto" in refused(capsys, 3, "run.toml", "--data", "book.txt", "--name", "a")


def test_a_dry_run_tells_the_facts_and_starts_nothing(here: Path, capsys: Captured) -> None:
    before = sorted(here.rglob("*"))
    assert main(("train", "run.toml", "--data", "book.txt", "--dry-run", "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layout"], facts["ranks"], facts["stages"]) == ("dp=1 pp=2 tp=1", 2, [1, 1])
    assert (facts["tokens_per_step"], facts["steps"], facts["micro_batches"]) == (128, 5, 4)
    assert main(("train", "run.toml", "--data", "book.txt", "--dry-run")) == 0
    assert "this run can start" in capsys.readouterr().out
    assert sorted(here.rglob("*")) == before


def test_a_dry_run_refuses_what_the_start_refuses(here: Path, capsys: Captured) -> None:
    (here / "runs" / "a").mkdir(parents=True)
    (here / "runs" / "a" / "run.toml").write_text(RUN)
    words = ("run.toml", "--data", "book.txt", "--dry-run", "--name")
    assert "already holds a run" in refused(capsys, 3, *words, "a")
    assert "is not the name of one folder" in refused(capsys, 2, *words, "../evil")


@pytest.mark.parametrize("words", [("--dry-run",), ()])
def test_weights_that_do_not_fit_their_configuration_get_the_same_answer(
    here: Path, capsys: Captured, words: tuple[str, ...]
) -> None:
    folder = shutil.copytree(WEIGHTS, here / "weights")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    said = refused(capsys, 1, "--set", "model.weights=weights", *words)
    assert "by its config.json it has (300, " in said


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.validation=0.2", "data.validation was 0.01 and is 0.2"),
        ("data.document_mask=true", "data.document_mask was False and is True"),
        ("recipe.batch=8", "recipe.batch was 4 and is 8"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused_unless_forced(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, change: str, says: str
) -> None:
    monkeypatch.chdir(copied)
    words = ("train", "--resume", "auto", "--set", change, "--set", "recipe.stop_at=7", "--dry-run")
    assert main(words) == 3
    assert re.search(rf"error: {re.escape(says)}: .*--from .*step-00000005.*--force", read(capsys))
    assert main((*words, "--force", "--json")) == 0
    assert says in json.loads(capsys.readouterr().out)["notes"][0]


@pytest.mark.ranks
def test_a_run_with_more_steps_is_told_of_its_learning_rate(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(copied)
    words = ["train", "--resume", "auto", "--dry-run", "--json", "--set", "recipe.stop_at=7"]
    words += ["--set", "recipe.steps=100"]
    assert main(words) == 0
    (line,) = json.loads(capsys.readouterr().out)["notes"]
    assert "recipe.steps was 8 and is 100" in line
    smooth = re.findall(r"--set \S+", line)
    assert main([*words, *" ".join(smooth).split()]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


@pytest.mark.ranks
def test_a_fork_goes_on_with_other_data_and_another_batch_and_says_so(copied: Path) -> None:
    (copied / "new.txt").write_text("Another night, and no storm at all. " * 100)
    command = phalanx(copied, "--from", "runs/a", "--name", "b", "--layout", "dp=1")
    command[command.index("book.txt")] = "new.txt"
    more = ("--set", "recipe.batch=2", "--set", "recipe.stop_at=6")
    done = finish(copied, [*command, *more])
    assert done.returncode == 0, done.stderr
    assert "resumed step-00000005" in done.stdout
    assert "the corpus was book.txt and is new.txt: other text is learned" in done.stdout
    assert "recipe.batch was 4 and is 2: " in done.stdout
    assert steps(copied / "runs" / "b") == [6]
    assert steps(copied / "runs" / "a") == [1, 2, 3, 4, 5]


@pytest.mark.ranks
def test_tasks_of_slurm_are_the_ranks_of_one_run(tmp_path: Path) -> None:
    train = phalanx(tmp_path, "--name", "a", "--json", "--set", "recipe.stop_at=2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "here", "MASTER_PORT": port}
    tasks = [
        subprocess.Popen(
            train,
            cwd=tmp_path,
            env={**os.environ, **slurm, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    first, second = (task.communicate(timeout=300) for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0], (first, second)
    assert json.loads(first[0])["last_step"] == 2
    assert second[0] == ""
    assert steps(tmp_path / "runs" / "a") == [1, 2]


@pytest.mark.ranks
def test_a_run_whose_output_nobody_reads_trains(tmp_path: Path) -> None:
    command = phalanx(tmp_path, "--name", "a", "--layout", "dp=1", "--set", "recipe.stop_at=1")
    closed = subprocess.run(
        ["sh", "-c", shlex.join(command) + " <&- >&- 2>&-"], cwd=tmp_path, check=False, timeout=300
    )
    assert closed.returncode == 0
    assert steps(tmp_path / "runs" / "a") == [1]


def test_a_restarted_job_may_always_say_resume_auto(here: Path, capsys: Captured) -> None:
    words = ("run.toml", "--data", "book.txt", "--name", "new", "--resume", "auto", "--dry-run")
    assert main(("train", *words)) == 0
    assert not (here / "runs").exists()


def test_a_run_goes_on_with_its_own_model(here: Path, capsys: Captured) -> None:
    """Also where all weights have the same shapes, so that nothing else would notice."""
    (here / "runs" / "a").mkdir(parents=True)
    (here / "runs" / "a" / "run.toml").write_text(RUN)
    change = ("--set", "model.heads=1", "--set", "model.head_dim=32")
    said = refused(capsys, 3, "--resume", "auto", *change)
    assert "a has model.heads=2, not 1; go on with that, or start another run" in said
