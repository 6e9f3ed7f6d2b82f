"""A plan of a whole training takes what a run has measured."""

import json
from pathlib import Path

import pytest

from phalanx.api.measured import measured_conditions
from phalanx.api.names import model_of
from phalanx.cli.main import main
from phalanx.core.errors import UsageError
from phalanx.planner.goodput import Conditions

FACTS = {"parameters": 1000, "restart_seconds": 42.0, "checkpoint_write_seconds": 0.5}


def run_with(folder: Path, **facts: object) -> Path:
    (folder / "summary.json").write_text(json.dumps(FACTS | facts))
    return folder


def test_restarts_and_saves_are_taken_and_the_rest_stays(tmp_path: Path) -> None:
    found = measured_conditions(run_with(tmp_path), Conditions(price=2.0))
    assert (found.restart, found.storage, found.price) == (42.0, 12 * 1000 / 0.5, 2.0)


def test_what_was_not_measured_stays_as_it_was_assumed(tmp_path: Path) -> None:
    found = measured_conditions(run_with(tmp_path, restart_seconds=None), Conditions())
    assert found.restart == Conditions().restart


def test_a_run_that_measured_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read what"):
        measured_conditions(tmp_path, Conditions())
    nothing = {"restart_seconds": None, "checkpoint_write_seconds": None}
    with pytest.raises(UsageError, match="neither been restarted nor saved"):
        measured_conditions(run_with(tmp_path, **nothing), Conditions())


def test_a_plan_shows_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "llama-3.2-1b", "h100x8", "--tokens", "1Mi", "--train-tokens", "1T", "--json")
    assert main((*words, "--measured", str(run_with(tmp_path)))) == 0
    assumptions = json.loads(capsys.readouterr().out)["training"]["assumptions"]
    assert assumptions["restart_seconds"] == 42.0


def test_an_estimate_takes_what_the_summary_of_a_run_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = model_of("llama-3.2-1b")
    run = run_with(tmp_path, parameters=shape.params())
    words = ("estimate", "llama-3.2-1b", "h100x8", "--layout", "zero=3", "--batch", "128")
    assert main((*words, "--train-tokens", "1T", "--measured", str(run), "--json")) == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert training["assumptions"]["restart_seconds"] == FACTS["restart_seconds"]
    assert training["checkpoint_write_seconds"] == FACTS["checkpoint_write_seconds"]
    lost = training["seconds"] / training["failure_interval_seconds"] * 42.0
    assert training["seconds"] - training["training_seconds"] > lost
    assert main((*words, "--train-tokens", "1T", "--measured", str(run))) == 0
    assert "1T tokens with this layout: " in capsys.readouterr().out
    assert main((*words, "--measured", str(run))) == 2
