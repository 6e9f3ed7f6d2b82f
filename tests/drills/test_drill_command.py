"""`phalanx drill` injures a run, and says in time and in bits what came of it."""

import json
import os
from pathlib import Path

import pytest

import phalanx
from phalanx.cli.main import main
from phalanx.drills.compare import fingerprint
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.faults.inject import PLAN

RUN = """
layout = "dp=2"
model = {layers = 2, hidden = 32, heads = 2}
recipe = {seq = 16, batch = 4, steps = 30, warmup = 2, evaluate_batches = 1}
"""

pytestmark = pytest.mark.ranks


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text("In the beginning was the word, and it was a byte.\n" * 60)
    file = tmp_path / "run.toml"
    file.write_text(f'{RUN}data = {{path = "{tmp_path / "book.txt"}", validation = 0.1}}\n')
    return file


def test_a_drill_says_when_a_fault_was_noticed_and_that_nothing_differs(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("drill", str(run_file), "--faults", "random,corrupt", "--kills", "2", "--steps", "30")
    log = tmp_path / "drill.jsonl"
    assert main((*words, "--log", str(log), "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["passed"], report["unmet"]) == (1, True, [])
    assert [case["fault"] for case in report["cases"]] == [
        *("SIGKILL", "SIGKILL", "bit flip"),
    ]
    for case in report["cases"]:
        assert case["equal"]
        assert 0 <= case["noticed_seconds"] < 60
    *kills, corrupted = report["cases"]
    assert all(kill["steps_repeated"] <= 10 for kill in kills)  # two saves apart, at most
    assert all(kill["back_seconds"] > 0 for kill in kills[1:])
    assert corrupted["steps_repeated"] > 0
    assert "PHALANX_FAULT_PLAN" not in os.environ
    kept = log.read_text().splitlines()
    log.write_text("\n".join(kept[:3]) + "\n")  # as if it had been ended: what is there stays
    assert main((*words, "--log", str(log), "--seed", "7")) == 2
    assert "the log of another drill (seed)" in capsys.readouterr().err


def test_a_run_that_comes_to_other_bits_is_told_as_different(
    run_file: Path, tmp_path: Path
) -> None:
    """The comparison itself: one bit of one tensor, one loss, one step done twice."""
    phalanx.train(run_file, name="a", runs=tmp_path)
    found = fingerprint(tmp_path / "a")
    assert found.differences(found) == []
    metrics = tmp_path / "a" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    line = json.loads(lines[2])
    changed = json.dumps(line | {"loss": line["loss"] * (1 + 2**-52)})
    metrics.write_text("\n".join([*lines[:2], changed, *lines[3:]]) + "\n")
    assert fingerprint(tmp_path / "a").differences(found) == ["the losses"]
    metrics.write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert fingerprint(tmp_path / "a").differences(found) == [
        *("the steps, each once", "the losses"),
    ]


def test_a_drill_of_nothing_is_refused(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("drill", str(run_file), "--kills", "-1")) == 2
    assert main(("drill", str(run_file), "--steps", "2")) == 2
    assert main(("drill", str(run_file), "--faults", "kil")) == 2


def test_a_drill_can_be_ended(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the signal that ends any run; an injury that sends it would go on."""
    ended = Fault(point="step.before", action="launcher", value="SIGTERM", step=2, rank=0)
    (tmp_path / "plan.json").write_text(FaultPlan((ended,)).to_json())
    monkeypatch.setenv(PLAN, str(tmp_path / "plan.json"))
    assert main(("drill", str(run_file), "--faults", "random")) == 75
    assert "the drill was ended; with --log FILE it goes on" in capsys.readouterr().err
