"""What is odd about the weights that training starts from is told, by whichever rank holds it."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_jobs import Trained, injured_job, train_job

from phalanx.core.errors import CheckpointError
from phalanx.core.layout import Layout
from phalanx.core.run import Data, Recipe, Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.model.init import shape_of_weights

WEIGHTS = Path(__file__).parents[1] / "model" / "data" / "llama-tied"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run from a folder in which a row that no token uses is not finite."""
    folder = Path(shutil.copytree(WEIGHTS, tmp_path / "weights"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][39, :3] = math.nan
    save_file(tensors | {"vision.tower": torch.ones(2)}, folder / "model.safetensors")
    np.save(tmp_path / "ids.npy", np.arange(600, dtype=np.uint16) % 39)
    return Run(
        model=replace(shape_of_weights(str(folder), {}), name="custom"),
        recipe=Recipe(seq=8, batch=4, steps=1, warmup=0, evaluate_batches=0),
        data=Data(path=str(tmp_path / "ids.npy")),
        weights=str(folder),
    )


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["dp=1", "dp=2 tp=2 zero=3"])
def test_what_is_odd_is_told_once_under_any_layout(
    ranks: RankPool, tmp_path: Path, run: Run, line: str
) -> None:
    run = replace(run, layout=Layout.parse(line))
    told: Trained = ranks.run(run.layout.ranks, train_job, run, tmp_path)[0]
    said = [event for event in told.events if event.startswith(run.weights)]
    assert len(said) == 2
    assert said[0].endswith("1 tensor without a place in the model, left out: vision.tower")
    assert ": 3 values of embedding.weight are nan or infinite; training goes on" in said[1]
    assert (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").exists()


@pytest.mark.ranks
def test_what_becomes_odd_besides_fails_a_save(ranks: RankPool, tmp_path: Path, run: Run) -> None:
    """The values that came with the folder stay where they are; one more is a fault."""
    run = replace(run, recipe=replace(run.recipe, steps=2), layout=Layout.parse("dp=2 zero=3"))
    spoil = Fault(
        point="step.before", action="set", value="nan", step=1, tensor="weight:norm", times=9
    )
    with pytest.raises(CheckpointError, match="nan or infinite"):
        ranks.run(2, injured_job, run, tmp_path, FaultPlan((spoil,)))
    assert list((tmp_path / "checkpoints").glob("step-*")) == []
