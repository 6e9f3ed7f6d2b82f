import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError, RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.run import Run
from phalanx.core.timeline import Span, Timeline
from phalanx.trainer.run.metrics_file import MetricsFile
from phalanx.trainer.run.report import StepMetrics, Summary, Validation
from phalanx.trainer.run.rundir import RunDirectory, require_free, write_text

CREATE = """
import sys
from pathlib import Path
from phalanx.trainer.run.rundir import RunDirectory
with RunDirectory.create(Path(sys.argv[1]), "busy") as directory:
    directory.write_run(__import__("phalanx.core.run", fromlist=["Run"]).Run())
    print("ready", flush=True)
    sys.stdin.read()
"""


def metrics(step: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        steps=10,
        loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=4096,
        seconds=0.5,
        tokens_per_second=8192.0,
        flops_per_second=1e9,
    )


def write_step(directory: RunDirectory, measured: StepMetrics) -> None:
    MetricsFile(directory.metrics_file, pytest.fail).add(measured)


def summary() -> Summary:
    return Summary(
        layout="dp=1 pp=1 tp=1",
        parameters=10,
        last_step=10,
        steps=10,
        first_loss=5.5,
        last_loss=math.inf,
        tokens=40960,
        seconds=5.0,
        tokens_per_second=8192.0,
        flops_per_second=1e9,
    )


def steps(directory: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in directory.metrics_file.read_text().splitlines()]


def used(runs: Path, name: str, last: int = 1) -> None:
    with RunDirectory.create(runs, name) as directory:
        directory.write_run(Run())
        for step in range(1, last + 1):
            write_step(directory, metrics(step))


def test_a_run_file_reads_back_to_the_same_run(tmp_path: Path) -> None:
    run = Run(layout=Layout(pp=2, tp=2, stages=(1, 3)))
    with RunDirectory.create(tmp_path, "a") as directory:
        directory.write_run(run)
        assert Run.from_tables(tomllib.loads(directory.run_file.read_text())) == run


def test_each_step_is_on_disk_as_soon_as_it_is_done(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "a") as directory:
        write_step(directory, metrics(1))
        write_step(directory, metrics(2, loss=math.nan))
        first, second = map(json.loads, directory.metrics_file.read_text().splitlines())
    assert (first["step"], first["loss"], first["lr"]) == (1, 2.0, 1e-3)
    assert second["loss"] is None  # JSON has no nan


def test_steps_that_are_done_again_after_a_resume_stand_once(tmp_path: Path) -> None:
    used(tmp_path, "a", last=7)
    with RunDirectory.open_for_resume(tmp_path, "a") as directory:
        directory.forget_after(4)
        write_step(directory, metrics(5))
        assert steps(directory) == [1, 2, 3, 4, 5]


def test_a_line_that_was_torn_by_a_crash_is_dropped_on_resume(tmp_path: Path) -> None:
    used(tmp_path, "a", last=2)
    with RunDirectory.open_for_resume(tmp_path, "a") as directory:
        with directory.metrics_file.open("a") as file:
            file.write('{"step": 3, "lo')
        directory.forget_after(3)
        assert steps(directory) == [1, 2]


def test_a_run_of_the_same_name_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    used(tmp_path, "a", last=3)
    with (
        pytest.raises(RefusedError, match=r"--resume auto --name a.*another --name"),
        RunDirectory.create(tmp_path, "a"),
    ):
        pass
    with RunDirectory.open_for_resume(tmp_path, "a") as directory:
        assert steps(directory) == [1, 2, 3]


def test_a_folder_of_somebody_else_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(RefusedError, match=r"thesis\.txt"), RunDirectory.create(tmp_path, "mine"):
        pass
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_run_that_took_no_step_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail_before_the_first_step() -> None:
        with RunDirectory.create(tmp_path / "runs", "a") as directory:
            directory.write_run(Run())
            directory.write_environment({"cores": 2})
            directory.checkpoints.mkdir()
            raise RefusedError("too long")

    with pytest.raises(RefusedError, match="too long"):
        fail_before_the_first_step()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_failed_later_keeps_all_it_had(tmp_path: Path) -> None:
    def fail_after_a_step() -> None:
        with RunDirectory.create(tmp_path, "a") as directory:
            directory.write_run(Run())
            write_step(directory, metrics(1))
            raise RefusedError("too late")

    with pytest.raises(RefusedError, match="too late"):
        fail_after_a_step()
    assert (tmp_path / "a" / "run.toml").exists()


def test_a_checkpoint_alone_is_reason_enough_to_keep_a_run(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "a") as directory:
        directory.write_run(Run())
        (directory.checkpoints / "step-00000001").mkdir(parents=True)
    assert (tmp_path / "a" / "run.toml").exists()


def test_a_run_in_use_is_refused_with_the_process_that_uses_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CREATE, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        for opened in (RunDirectory.create, RunDirectory.open_for_resume):
            with (
                pytest.raises(RefusedError, match=rf"in use by process {other.pid}\b"),
                opened(tmp_path, "busy"),
            ):
                pass
        other.kill()
    with RunDirectory.open_for_resume(tmp_path, "busy") as directory:  # the lock died with it
        assert directory.name == "busy"


def test_two_runs_in_the_same_second_get_two_folders(tmp_path: Path) -> None:
    with (
        RunDirectory.create(tmp_path) as first,
        RunDirectory.create(tmp_path) as second,
    ):
        assert first.path != second.path
        assert first.name.startswith("run-20")


def test_without_a_name_the_run_that_was_written_last_goes_on(tmp_path: Path) -> None:
    used(tmp_path, "old")
    used(tmp_path, "new")
    os.utime(tmp_path / "new" / "run.toml", (2e9, 2e9))
    with RunDirectory.open_for_resume(tmp_path) as directory:
        assert directory.name == "new"


def test_resuming_a_run_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    used(tmp_path, "first-try")
    with (
        pytest.raises(UsageError, match="did you mean first-try"),
        RunDirectory.open_for_resume(tmp_path, "first-tyr"),
    ):
        pass


def test_resuming_where_nothing_ran_says_how_to_start(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="leave out --resume"),
        RunDirectory.open_for_resume(tmp_path / "nothing"),
    ):
        pass


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "/abs"])
def test_a_name_is_one_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--runs-dir"), RunDirectory.create(tmp_path, name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_earlier_sessions_stay_in_the_environment(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "a") as directory:
        for layout in ("dp=1", "dp=2", "dp=4"):
            directory.write_environment({"layout": layout})
        document = json.loads((directory.path / "env.json").read_text())
    assert document["layout"] == "dp=4"
    assert [session["layout"] for session in document["earlier"]] == ["dp=1", "dp=2"]


def test_summary_and_timeline_are_strict_json(tmp_path: Path) -> None:
    def reject(word: str) -> None:
        raise AssertionError(word)

    with RunDirectory.create(tmp_path, "a") as directory:
        directory.write_summary(summary())
        directory.write_timeline(Timeline("measured", (Span(0, "0F0", "compute", 0.0, 1.0),)))
        found = json.loads(directory.summary_file.read_text(), parse_constant=reject)
        trace = json.loads((directory.path / "timeline.json").read_text(), parse_constant=reject)
    assert (found["schema"], found["first_loss"], found["last_loss"]) == (1, 5.5, None)
    assert trace["traceEvents"][1]["name"] == "0F0"


def test_a_failed_write_keeps_the_old_text_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new\ud800")  # cannot be encoded: fails half way
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_runs_that_are_a_file_are_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with (
        pytest.raises(PhalanxError, match=r"cannot write .*runs"),
        RunDirectory.create(tmp_path / "runs", "a"),
    ):
        pass


def validated(directory: RunDirectory, step: int) -> None:
    directory.write_validation(Validation(step, 1.5, 0.25))


def test_a_validation_is_added_to_the_line_of_its_step(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "a") as directory:
        for step in (1, 2):
            write_step(directory, metrics(step))
        validated(directory, 2)
        write_step(directory, metrics(3))
        lines = [json.loads(line) for line in directory.metrics_file.read_text().splitlines()]
    assert [line["validation_loss"] for line in lines] == [None, 1.5, None]
    assert lines[1]["validation_seconds"] == 0.25
    assert lines[1]["loss"] == 2.0


def test_a_validation_of_another_step_than_the_last_changes_nothing(tmp_path: Path) -> None:
    """A finished run that is started again measures, and has no new step to write it to."""
    with RunDirectory.create(tmp_path, "a") as directory:
        validated(directory, 1)
        write_step(directory, metrics(1))
        before = directory.metrics_file.read_bytes()
        validated(directory, 2)
        assert directory.metrics_file.read_bytes() == before


@pytest.mark.parametrize("name", ["a", "run-1", "my run", "7B_v2.1", "größe", "x" * 100])
def test_a_name_of_one_folder_is_a_name(tmp_path: Path, name: str) -> None:
    require_free(tmp_path, name)
    with RunDirectory.create(tmp_path, name) as directory:
        assert directory.path.parent == tmp_path


@pytest.mark.parametrize(
    "name", ["../evil", "a/b", "a:b", "a\nb", ".hidden", "..", " a", "a ", "-x", "x" * 101, "a\0"]
)
def test_what_is_no_name_of_one_folder_is_refused_before_anything_is_made(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError, match="is not the name of one folder"):
        require_free(tmp_path, name)
    with pytest.raises(UsageError), RunDirectory.create(tmp_path, name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused_without_opening_it(tmp_path: Path) -> None:
    used(tmp_path, "a")
    with pytest.raises(RefusedError, match="already holds a run; go on with it by --resume auto"):
        require_free(tmp_path, "a")


def test_runs_that_cannot_be_written_are_refused_before_they_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PhalanxError, match="file is no folder that may be written"):
        require_free(tmp_path / "file" / "runs", "")
