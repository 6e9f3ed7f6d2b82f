"""Training that starts from a folder of weights goes on where the folder was written."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.synthetic import SyntheticStream
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Case, verify
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import forward_backward, update
from phalanx.trainer.model.huggingface import export_hf
from phalanx.trainer.model.init import init_source, shape_of_weights
from phalanx.trainer.parallel.mesh import build_mesh

SHAPE = ModelShape(
    layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=40, qk_norm=True, tied=True
)
RUN = Run(
    model=SHAPE,
    layout=Layout(precision="fp64"),
    recipe=Recipe(seq=8, batch=4, learning_rate=0.05, warmup=0, init_std=0.2, seed=5),
)


def built(run: Run) -> Engine:
    return build_engine(run, build_mesh(run.layout, torch.device("cpu")))


def loss_of(engine: Engine, step: int = 1) -> float:
    recipe = engine.run.recipe
    stream = SyntheticStream(engine.run.model.vocab, recipe.seq, recipe.batch, recipe.seed)
    return forward_backward(engine, step, stream.batch(step, engine.positions()))


def loss_from_the_start(run: Run) -> float:
    return loss_of(built(run))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A model after one step as a folder, and the loss of its next step."""
    engine = built(RUN)
    update(engine, loss_of(engine, 0))
    whole = {
        slot.declaration.name: unit.unit.master[slot.start : slot.stop].view(slot.box.sizes)
        for unit in engine.units
        for slot in unit.unit.slots
    }
    folder = tmp_path_factory.mktemp("weights") / "model"
    export_hf(whole.__getitem__, SHAPE, folder, torch.float64)
    return folder, loss_of(engine)


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["dp=1", "dp=2 tp=2 zero=3", "pp=2 tp=2", "dp=2 zero=1 mb=2"])
def test_the_first_loss_is_the_next_one_of_what_was_converted(
    ranks: RankPool, converted: tuple[Path, float], line: str
) -> None:
    folder, loss = converted
    layout = replace(Layout.parse(line), precision="fp64")
    run = replace(RUN, layout=layout, weights=str(folder))
    losses = ranks.run(layout.ranks, loss_from_the_start, run)
    assert losses == pytest.approx([loss] * layout.ranks, rel=1e-12)
    assert loss_from_the_start(RUN) != pytest.approx(loss, rel=1e-3)


@pytest.mark.ranks
def test_the_oracle_starts_from_the_folder_too(
    ranks: RankPool, converted: tuple[Path, float]
) -> None:
    layout = Layout.parse("dp=2 tp=2 zero=2 precision=fp64")
    case = Case(replace(RUN, layout=layout, weights=str(converted[0])))
    assert verify(ranks, case).complaints == []


def test_a_run_file_may_repeat_the_sizes_of_the_folder(converted: tuple[Path, float]) -> None:
    said = {"hidden": 16, "qk_norm": True, "rope_theta": 10_000}
    assert shape_of_weights(str(converted[0]), said) == SHAPE


def test_sizes_that_contradict_the_folder_are_named(converted: tuple[Path, float]) -> None:
    with pytest.raises(UsageError, match=r"model.layers is 3, and in .*model it is 2; leave out"):
        shape_of_weights(str(converted[0]), {"layers": 3})
    run = replace(RUN, model=replace(SHAPE, ffn=32), weights=str(converted[0]))
    with pytest.raises(UsageError, match=r"model.ffn is 32, and in"):
        init_source(run)
