"""The loss scale of fp16: what it learns, and that all ranks learn the same."""

from dataclasses import dataclass

import pytest
import torch

from phalanx.core.layout import Layout
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import default_case
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.precision.loss_scale import PATIENCE, LossScale
from phalanx.trainer.run.state import progress


def test_an_overflow_halves_it_and_two_thousand_clean_steps_double_it() -> None:
    scale = LossScale(2.0**16, dynamic=True)
    scale.learn(skipped=True)
    assert scale.value == 2.0**15
    for _ in range(PATIENCE - 1):
        scale.learn(skipped=False)
    assert scale.value == 2.0**15
    scale.learn(skipped=False)
    assert scale.value == 2.0**16


def test_an_overflow_starts_the_count_of_clean_steps_again() -> None:
    scale = LossScale(2.0**16, clean=PATIENCE - 1, dynamic=True)
    scale.learn(skipped=True)
    scale.learn(skipped=False)
    assert (scale.value, scale.clean) == (2.0**15, 1)


def test_it_never_falls_below_one_and_is_one_without_fp16() -> None:
    lowest = LossScale(1.0, dynamic=True)
    lowest.learn(skipped=True)
    assert lowest.value == 1.0
    assert not lowest.can_fall
    fixed = LossScale()
    fixed.learn(skipped=True)
    assert fixed.value == 1.0


@dataclass
class Told:
    """What a rank says of two steps, the first of which overflowed somewhere."""

    skipped: list[bool]
    loss_scales: list[float]
    updates: list[int]
    rates: list[float]
    moved: list[bool]
    saved: list[float]


def overflowing_job(line: str, rank: int) -> Told:
    """Two steps; in the first, one gradient of one rank is too large for fp16."""
    case = default_case(Layout.parse(line))
    mesh = build_mesh(case.run.layout, torch.device("cpu"))
    engine = build_engine(case.run, mesh)
    hook = None
    if case.run.layout.rank_at(mesh.at) == rank:
        weight = engine.units[-1].unit.parameters[-1]
        hook = weight.register_hook(lambda grad: grad * 1e8)
    told = Told([], [], [], [], [], [])
    for step in range(2):
        before = _weights(engine)
        batch = case.stream().batch(step, engine.positions())
        result = train_step(engine, step, batch)
        told.skipped.append(result.skipped)
        told.loss_scales.append(result.loss_scale)
        told.updates.append(engine.optimizer.updates)
        told.rates.append(engine.optimizer.learning_rate)
        told.moved.append(not torch.equal(before, _weights(engine)))
        if hook is not None:
            hook.remove()
    told.saved = progress(engine, 2, {})["loss_scale"]
    return told


def _weights(engine: Engine) -> torch.Tensor:
    return torch.cat([unit.unit.master.clone() for unit in engine.units])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("dp=2 zero=0", 1),
        ("dp=2 zero=3", 0),
        ("pp=2", 0),
        ("pp=2", 1),
        ("dp=2 tp=2 zero=2", 3),
    ],
)
def test_an_overflow_on_one_rank_is_the_same_skip_everywhere(
    ranks: RankPool, line: str, rank: int
) -> None:
    layout = Layout.parse(f"{line} precision=fp16")
    everyone = ranks.run(layout.ranks, overflowing_job, str(layout), rank)
    first = everyone[0]
    assert first.skipped == [True, False]
    assert first.loss_scales == [2.0**16, 2.0**15]
    assert first.updates == [0, 1]
    assert first.moved == [False, True]
    assert first.rates[0] < first.rates[1]
    assert first.saved == [2.0**15, 1]
    assert all(told == first for told in everyone)


def test_gradients_too_small_for_fp16_vanish_unless_they_are_scaled() -> None:
    """A loss 2^-20 times as large stands for gradients 2^-20 times as small."""
    case = default_case(Layout.parse("precision=fp16"))
    norms = {}
    for value in (2.0**-20, 1.0, 2.0**16):
        engine = build_engine(case.run, build_mesh(case.run.layout, torch.device("cpu")))
        engine.loss_scale.value = value
        batch = case.stream().batch(0, engine.positions())
        norms[value] = train_step(engine, 0, batch).grad_norm
    assert norms[2.0**-20] < 0.1 * norms[2.0**16]
    assert norms[1.0] == pytest.approx(norms[2.0**16], rel=1e-3)
