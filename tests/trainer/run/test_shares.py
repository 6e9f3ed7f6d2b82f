"""What two ranks say of their time in `ranks.jsonl` is what their metrics say."""

import json
from pathlib import Path
from typing import Any

import pytest

import phalanx

STEPS = 9


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two data-parallel ranks, just now."""
    runs = tmp_path_factory.mktemp("runs")
    model = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "vocab": 256}
    recipe = {"seq": 32, "batch": 4, "steps": STEPS, "warmup": 1, "evaluate_every": 4}
    phalanx.train(
        {
            "model": model,
            "layout": "dp=2 zero=1",
            "recipe": {**recipe, "sample_tokens": 0, "checkpoint_every": 4},
        },
        name="two",
        runs=runs,
    )
    return runs / "two"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.ranks
def test_every_step_is_in_one_window(trained: Path):
    windows = lines(trained / "ranks.jsonl")
    counted = [step for w in windows for step in range(w["first"], w["last"] + 1)]
    assert counted == list(range(1, STEPS + 1))


@pytest.mark.ranks
def test_seconds_of_windows_are_those_of_the_metrics(trained: Path):
    metrics = {line["step"]: line["seconds"] for line in lines(trained / "metrics.jsonl")}
    for window in lines(trained / "ranks.jsonl"):
        expected = sum(metrics[step] for step in range(window["first"], window["last"] + 1))
        assert window["seconds"] == pytest.approx(expected)
        assert window["seconds"] == pytest.approx(window["ranks"][0]["seconds"])


@pytest.mark.ranks
def test_no_rank_says_more_than_its_clock(trained: Path):
    """What lies between steps, such as the forward passes of a validation, is in no window."""
    for window in lines(trained / "ranks.jsonl"):
        for each in window["ranks"]:
            kinds = [s for name, s in each.items() if name not in ("rank", "seconds")]
            assert min(kinds) >= 0
            assert sum(kinds) <= each["seconds"] * (1 + 1e-9)


@pytest.mark.ranks
def test_the_mean_is_that_of_the_ranks(trained: Path):
    for window in lines(trained / "ranks.jsonl"):
        for name, mean in window["mean"].items():
            each = [rank.get(name, 0.0) for rank in window["ranks"]]
            assert mean == pytest.approx(sum(each) / 2)


@pytest.mark.ranks
def test_a_fresh_run_is_explained_and_its_messages_are_the_planned_ones(trained: Path):
    found = phalanx.report(trained)
    assert sum(t.measured for t in found.terms) == pytest.approx(found.step_seconds, rel=1e-3)
    assert {message.axis for message in found.traffic} == {"data", "world"}
    assert all(message.equal for message in found.traffic)
    assert found.step.first == 6
