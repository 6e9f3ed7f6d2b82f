import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.api.documents import DOCUMENTS
from phalanx.cli.main import main
from phalanx.core.layout import Layout

ESTIMATE = ("--layout", "dp=2", "--batch", "4", "--seq", "64", "--json")
MODEL = "layers = 2\nhidden = 64\nheads = 2\nvocab = 256\n"


@pytest.mark.ranks
def test_a_calibration_is_a_cluster_for_every_planning_command(tmp_path, capsys):
    path, model = tmp_path / "two.toml", tmp_path / "model.toml"
    model.write_text(MODEL)
    assert main(["calibrate", "--quick", "--quiet", "--ranks", "2", "-o", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {name.partition("{")[0].partition("[")[0] for name in DOCUMENTS["calibrate"]} == set(
        document
    )
    assert {each["name"] for each in document["collectives"]} >= {"all_reduce", "send"}
    assert main(["estimate", str(model), str(path), *ESTIMATE]) == 0
    found = json.loads(capsys.readouterr().out)
    assert str(Layout.parse(found["layout"]).precision) == "fp32"
    assert 0 < found["step_seconds"] < 60
    words = ("plan", str(model), str(path), "--batch", "4", "--seq", "64", "--json")
    assert main(list(words)) == 0
    assert json.loads(capsys.readouterr().out)["layouts"]
    assert (
        main(["dryrun", str(model), str(path), "--layout", "dp=2", "--batch", "4", "--seq", "64"])
        == 0
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "0"], "--ranks is 0"),
        (["-o", "nowhere/a.toml"], "no such folder"),
        (["-o", "a.txt"], "does not end in .toml"),
        (["-o", "other.toml"], "holds something else"),
    ],
)
def test_what_cannot_be_calibrated_is_said_before_anything_is_measured(
    words, told, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.toml").write_text("layers = 2\n")
    assert main(["calibrate", *words]) == 2
    assert told in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.toml"]


@pytest.mark.ranks
def test_a_calibration_that_is_killed_leaves_what_was_there(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text("[measured]\n")
    command = [sys.executable, "-m", "phalanx", "calibrate", "-o", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # it measures
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while list_of(tmp_path) != ["one.toml"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list_of(tmp_path) == ["one.toml"]
    assert path.read_text() == "[measured]\n"


def list_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
