import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import entries_for_launch as entries
import pytest

from phalanx.core.errors import DataError, PhalanxError, StartError
from phalanx.trainer.run.cores import num_threads
from phalanx.trainer.run.launch import launch
from phalanx.trainer.run.restart import WorkerCrashError

pytestmark = pytest.mark.ranks
HERE = Path(__file__).parent

PROGRAM = """
import sys
from phalanx.core.errors import PhalanxError, StartError
from phalanx.trainer.run.launch import WarmStart, launch
if __name__ == "__main__":
    sys.path.insert(0, {here!r})
    WarmStart().begin()
    import entries_for_launch as entries
    try:
        sys.exit(launch(entries.{entry}, {args!r}, 2))
    except PhalanxError as error:
        sys.exit(type(error).__name__)
"""


def wait_for(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def start(folder: Path, entry: str, *args: object) -> subprocess.Popen[str]:
    """A launcher of two ranks in its own process group."""
    script = folder / "program.py"
    script.write_text(PROGRAM.format(here=str(HERE), entry=entry, args=args))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextmanager
def training(
    folder: Path, seconds: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher, once both of its ranks are at work."""
    launcher = start(folder, "save_when_asked", str(folder), seconds)
    try:
        files = [folder / f"pid-{rank}" for rank in range(2)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        yield launcher, [int(file.read_text()) for file in files]
    finally:
        launcher.kill()
        launcher.communicate()


def saved(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("saved-*"))]


def test_ranks_know_their_place_and_reach_each_other(tmp_path: Path) -> None:
    assert launch(entries.note, (str(tmp_path),), 3) == 0
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [f["local"] for f in found] == [[0, 3], [1, 3], [2, 3]]
    assert [f["total"] for f in found] == [3.0, 3.0, 3.0]
    assert len({f["pid"] for f in found} - {os.getpid()}) == 3


def test_ranks_share_the_cores_and_stay_on_this_machine(tmp_path: Path) -> None:
    launch(entries.note, (str(tmp_path),), 2)
    found = json.loads((tmp_path / "1.json").read_text())
    assert found["threads"] == num_threads(2)
    assert found["interface"] in ("lo", "lo0")


def test_the_largest_exit_code_comes_home() -> None:
    assert launch(entries.return_codes, ([0, 75],), 2) == 75


def test_a_refusal_on_one_rank_arrives_as_it_was_raised() -> None:
    with pytest.raises(DataError, match=r"^the text ends here; give a longer one$"):
        launch(entries.refuse_on_one_rank, (1,), 3)


def test_a_refusal_on_every_rank_arrives_once() -> None:
    with pytest.raises(DataError, match=r"^nobody can read this$"):
        launch(entries.refuse_on_all_ranks, (), 2)


def test_a_missing_file_is_one_line_too() -> None:
    with pytest.raises(PhalanxError, match=r"^/nowhere/at/all: No such file or directory$"):
        launch(entries.miss_a_file, (), 1)


def test_a_crash_shows_the_traceback_of_the_rank_that_crashed() -> None:
    with pytest.raises(WorkerCrashError, match="ZeroDivisionError: a bug of ours") as caught:
        launch(entries.crash_on_one_rank, (0,), 2)
    assert str(caught.value).startswith("rank 0 crashed:\nTraceback")
    assert "crash_on_one_rank" in str(caught.value)


def test_a_killed_rank_is_named_with_what_may_have_killed_it() -> None:
    with pytest.raises(WorkerCrashError, match=r"rank 1 was ended by SIGKILL.*memory"):
        launch(entries.die_on_one_rank, (1,), 2)


def test_ranks_that_cannot_connect_are_started_once_more_and_that_is_told(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    entry = entries.connect_at_the_second_start
    assert launch(entry, (str(tmp_path),), 2, on_event=told.append) == 0
    assert told == [
        "starting 2 ranks once more: rank 1 cannot connect to the others: connectFullMesh failed"
    ]


def test_ranks_that_never_connect_end_in_a_line() -> None:
    told: list[str] = []
    with pytest.raises(StartError, match=r"^nobody is there$"):
        launch(entries.never_connect, (), 2, on_event=told.append)
    assert len(told) == 2


def test_who_sleeps_through_which_message_is_one_line() -> None:
    line = r"^rank 0 waited 1 s for rank 1: 'gradients' along data \(ranks 0, 1\) never came$"
    with pytest.raises(PhalanxError, match=line):
        launch(entries.sleep_through_a_message, (1,), 2)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("sleep_through_a_message", "LostMessageError"),
        ("refuse_on_one_rank", "DataError"),
        ("crash_on_one_rank", "WorkerCrashError"),
    ],
)
def test_a_failure_prints_nothing_but_what_the_caller_prints(
    tmp_path: Path, entry: str, error: str
) -> None:
    launcher = start(tmp_path, entry, 1)
    assert launcher.communicate(timeout=30) == ("", f"{error}\n")
    assert launcher.returncode == 1


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_nothing_listens_to_other_machines(tmp_path: Path) -> None:
    launch(entries.note, (str(tmp_path),), 2)
    found = json.loads((tmp_path / "0.json").read_text())
    assert len(found["listens"]) >= 2  # the store, and gloo
    assert all(address in ("127.0.0.1", "::1") for address in found["listens"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_lets_the_ranks_save(tmp_path: Path, number: int) -> None:
    with training(tmp_path) as (launcher, _):
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=20)
        assert launcher.returncode == 75
        assert errors == ""
    first, second = saved(tmp_path)
    assert first == second


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_whole_group_lets_the_ranks_save(tmp_path: Path, number: int) -> None:
    with training(tmp_path, seconds=1.0) as (launcher, _):
        os.killpg(launcher.pid, number)
        _, errors = launcher.communicate(timeout=20)
        assert launcher.returncode == 75
        assert errors == ""
    assert len(saved(tmp_path)) == 2


def test_a_second_interrupt_does_not_wait_for_the_save(tmp_path: Path) -> None:
    with training(tmp_path, seconds=60.0) as (launcher, pids):
        launcher.send_signal(signal.SIGINT)
        time.sleep(1.0)
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=10)
        assert launcher.returncode == 75
        assert not any(alive(pid) for pid in pids)
    assert saved(tmp_path) == []


def test_a_killed_launcher_leaves_no_ranks_behind(tmp_path: Path) -> None:
    with training(tmp_path) as (launcher, pids):
        launcher.kill()
        wait_for(lambda: not any(alive(pid) for pid in pids), seconds=5)
