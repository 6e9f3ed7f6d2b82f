"""A rank that hangs is named and ended, and the run goes on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.faults.inject import PLAN
from phalanx.trainer.run.events import read_events

SHAPE = ModelShape(layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256, tied=True)
RECIPE = Recipe(
    **{"seq": 16, "batch": 4, "steps": 8, "warmup": 2, "evaluate_batches": 2},
    **{"evaluate_every": 3, "checkpoint_every": 2, "sample_tokens": 0},
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "book.txt").write_text("In the beginning was the word, and it was a byte.\n" * 60)
    data = Data(path=str(tmp_path / "book.txt"), validation=0.1)
    return Run(model=SHAPE, recipe=RECIPE, data=data, layout=Layout.parse("dp=2"))


@pytest.mark.ranks
def test_ranks_that_are_stopped_or_hold_the_interpreter_are_named_and_replaced(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Fault(
        point="step.before_update", action="signal", value="SIGSTOP", rank=1, step=3, attempt=0
    )
    holding = Fault(point="step.before", action="gil", value=600, rank=0, step=5, attempt=1)
    (tmp_path / "plan.json").write_text(FaultPlan((stopped, holding)).to_json())
    monkeypatch.setenv(PLAN, str(tmp_path / "plan.json"))
    phalanx.train(run, name="a", runs=tmp_path)
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    events = read_events(tmp_path / "a" / "events.jsonl")
    first, second = (event for event in events if event["kind"] == "restart")
    assert first["rank"] == 1
    assert "rank 1 is stopped (step 3, reduce) for 5." in first["text"]
    assert "rank 0 waits for 'gradient norm' along world" in first["text"]
    assert second["rank"] == 0
    assert "_hold_the_gil (phalanx/trainer/faults/inject.py:" in second["text"]
    assert 5 <= second["data"]["stalled_seconds"] < 10


@pytest.mark.sweep
def test_nobody_is_suspected_in_ten_thousand_clean_steps(run: Run, tmp_path: Path) -> None:
    """With saves, validations, looks at what is held, products, and passes done twice."""
    recipe = replace(run.recipe, steps=10_000, checkpoint_every=50, evaluate_every=100)
    recipe = replace(recipe, check_every=10, repeat_every=50)
    phalanx.train(replace(run, recipe=recipe), name="a", runs=tmp_path)
    events = read_events(tmp_path / "a" / "events.jsonl")
    assert not [e for e in events if e["kind"] in ("restart", "suspicion", "set aside")]
