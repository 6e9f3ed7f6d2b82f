"""Two runs: the changes of the terms are the change of the step."""

import json
import math
from pathlib import Path

import pytest
from recorded_runs import RECORDED, rewrite

from phalanx.cli.main import main
from phalanx.reports.difference import ReportDifference
from phalanx.reports.report import report_on


def longer(line: dict) -> dict:
    line["seconds"] += 0.7
    line["mean"]["waiting for data"] = 0.7
    return line


def test_changes_add_up_to_the_change_of_the_step(copied: Path):
    rewrite(copied / "ranks.jsonl", longer)
    found = ReportDifference(report_on(RECORDED), report_on(copied))
    assert math.fsum(change.change for change in found.terms) == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(0.1)
    largest = max(found.terms, key=lambda change: change.change)
    assert largest.name == "exposed messages: data"
    assert largest.change == pytest.approx(0.1)


def test_a_run_differs_in_nothing_from_itself():
    found = ReportDifference(report_on(RECORDED), report_on(RECORDED))
    assert found.seconds == 0
    assert found.keys == ()
    assert {change.change for change in found.terms} == {0.0}


def test_keys_that_differ_are_said_with_both_values(
    copied: Path, capsys: pytest.CaptureFixture[str]
):
    text = (copied / "run.toml").read_text()
    (copied / "run.toml").write_text(text.replace("batch = 8", "batch = 16") + "new = 1\n")
    assert main(["report", str(RECORDED), str(copied), "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert {"key": "recipe.batch", "first": 8, "second": 16} in keys
    assert {"key": "data.new", "first": None, "second": 1} in keys


def test_a_run_without_a_step_is_compared_by_its_keys(
    copied: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("metrics.jsonl", "ranks.jsonl"):
        (copied / name).unlink()
    found = ReportDifference(report_on(RECORDED), report_on(copied))
    assert found.seconds is None
    json.dumps(found.to_dict(), allow_nan=False)
    assert main(["report", str(RECORDED), str(copied)]) == 0
    assert "no key of their run files differs" in capsys.readouterr().out
