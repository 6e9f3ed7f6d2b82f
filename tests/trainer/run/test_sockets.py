"""Ranks start also where temporary files have a path that no socket can have."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing, multiprocessing.connection, sys, tempfile
from phalanx.trainer.run.sockets import keep_socket_paths_short
if sys.argv[1] == "ours":
    keep_socket_paths_short()
with multiprocessing.connection.Listener(family="AF_UNIX") as listener:
    print(listener.address)
    print(tempfile.gettempdir())
"""


def listen(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def test_a_socket_has_a_short_path_and_other_files_stay_where_they_should(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 110)
    deep.mkdir()
    assert "too long" in listen(deep, "theirs").stderr
    done = listen(deep, "ours")
    assert done.returncode == 0, done.stderr
    address, files = done.stdout.splitlines()
    assert len(address) <= 107
    assert files == str(deep)
    assert not Path(address).parent.exists()  # it is tidied away


def test_a_short_path_is_left_alone() -> None:
    usual = Path("/tmp")
    address, _ = listen(usual, "ours").stdout.splitlines()
    assert Path(address).is_relative_to(usual)
