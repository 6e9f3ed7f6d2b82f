import json
import platform
import subprocess
from pathlib import Path

import torch

from phalanx.core.layout import Layout
from phalanx.trainer.run.environment import describe_environment, git_state


def test_the_environment_has_versions_hardware_and_layout() -> None:
    found = describe_environment(Layout(pp=2, tp=2), torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert (found["layout"], found["ranks"]) == ("dp=1 pp=2 tp=2", 4)
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**28


def test_the_environment_does_not_name_the_machine() -> None:
    found = json.dumps(describe_environment(Layout(), torch.device("cpu")))
    assert f'"{platform.node()}"' not in found


def test_outside_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


def test_a_changed_file_is_told_from_the_commit(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "modified": False}
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {"commit": commit, "modified": True}
