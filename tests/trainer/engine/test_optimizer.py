import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.core.layout import Layout
from phalanx.core.run import Recipe
from phalanx.oracle.cases import CaseSpec
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.optimizer import MOMENTS, Optimizer, clip, global_norm
from phalanx.trainer.engine.step import update
from phalanx.trainer.engine.unit import Unit
from phalanx.trainer.model.parameters import WHOLE, Declared, Initial, declared_in, initial_values
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.data import ShardedUnit
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.precision.dtypes import Dtypes

CPU = torch.device("cpu")
ALONE = Group("world", (0,), None, Ledger())


class Layer(Declared):
    """A matrix, which decays, and a vector, which does not."""

    def __init__(self, index: int) -> None:
        super().__init__(f"layer.{index}")
        self.declare("weight", (4, 3))
        self.declare("bias", (4,), init="ones")


def one_rank(count: int = 2) -> list[ShardedUnit]:
    """Units of one rank, filled."""
    mesh = build_mesh(Layout(), CPU)
    units = []
    for i in range(count):
        held = list(declared_in(Layer(i)))
        unit = Unit(f"layer.{i}", held, WHOLE, WHOLE, Dtypes.named("fp64", CPU))
        units.append(ShardedUnit(unit, mesh, mesh.copies, tied=False))
        unit.fill(lambda d, box: initial_values(d, box, Initial(0, 1.0, 2)))
    return units


def tensors(units: list[ShardedUnit], flat: str) -> Iterator[Tensor]:
    """Each parameter's stretch of `master` or `grad`."""
    for sharded in units:
        for slot in sharded.unit.slots:
            yield getattr(sharded.unit, flat)[slot.start : slot.stop]


def set_gradients(units: list[ShardedUnit], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for unit in units:
        grad = torch.randn(unit.unit.grad.shape, generator=generator, dtype=torch.float64)
        unit.unit.grad.copy_(grad * scale)


@pytest.mark.parametrize("kind", [2.0, math.inf])
@given(seed=st.integers(0, 1000))
def test_the_global_norm_is_that_of_all_gradients_together(kind: float, seed: int) -> None:
    units = one_rank()
    set_gradients(units, seed)
    expected = torch.nn.utils.get_total_norm(list(tensors(units, "grad")), kind).item()
    assert global_norm(units, ALONE, kind) == pytest.approx(expected, rel=1e-14)


@given(seed=st.integers(0, 1000), limit=st.floats(0.01, 100))
def test_clipping_brings_the_norm_down_to_the_limit_and_never_up(seed: int, limit: float) -> None:
    units = one_rank()
    set_gradients(units, seed)
    norm = global_norm(units, ALONE, 2.0)
    clip(units, norm, limit)
    assert global_norm(units, ALONE, 2.0) == pytest.approx(min(norm, limit), rel=1e-13)


def test_a_limit_of_zero_clips_nothing() -> None:
    units = one_rank()
    set_gradients(units, 1, scale=1e6)
    before = [x.clone() for x in tensors(units, "grad")]
    clip(units, global_norm(units, ALONE, 2.0), 0.0)
    assert all(torch.equal(x, y) for x, y in zip(tensors(units, "grad"), before, strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_each_parameter_moves_as_torch_moves_it_alone(name: str) -> None:
    recipe = Recipe(optimizer=name, warmup=3, learning_rate=0.1, steps=10)  # type: ignore[arg-type]
    units = one_rank()
    optimizer = Optimizer(recipe, units)
    copies = [x.clone() for x in tensors(units, "master")]
    groups = [
        {"params": [x], "weight_decay": recipe.weight_decay if x.numel() == 12 else 0.0}
        for x in copies
    ]
    betas = (recipe.beta1, recipe.beta2)
    torchs = (
        torch.optim.SGD(groups)
        if name == "sgd"
        else torch.optim.AdamW(groups, betas=betas, eps=recipe.eps)
    )
    for step in range(5):
        set_gradients(units, step)
        for copy, grad in zip(copies, tensors(units, "grad"), strict=True):
            copy.grad = grad.clone()
        for group in torchs.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.step()
        torchs.step()
    assert optimizer.updates == 5
    for mine, theirs in zip(tensors(units, "master"), copies, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-15)


def test_moments_carry_an_optimizer_on_bit_for_bit() -> None:
    recipe = Recipe(warmup=0, steps=10)
    straight, before, after = one_rank(), one_rank(), one_rank()
    whole, first, second = (Optimizer(recipe, units) for units in (straight, before, after))
    for step in range(4):
        set_gradients(straight, step)
        whole.step()
    for step in range(2):
        set_gradients(before, step)
        first.step()
    second.updates = first.updates
    for old, new in zip(before, after, strict=True):
        new.unit.master.copy_(old.unit.master)
        moments = first.moments(old.unit)
        assert sorted(moments) == sorted(MOMENTS)
        second.restore(new.unit, moments)
    for step in range(2, 4):
        set_gradients(after, step)
        second.step()
    pairs = zip(tensors(straight, "master"), tensors(after, "master"), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def test_sgd_has_no_moments() -> None:
    units = one_rank(1)
    assert Optimizer(Recipe(optimizer="sgd"), units).moments(units[0].unit) == {}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_moves_nothing_and_does_not_count(
    broken: float, where: str
) -> None:
    run = CaseSpec("dp=1").case().run
    engine = build_engine(run, build_mesh(run.layout, CPU))
    before = [unit.unit.master.clone() for unit in engine.units]
    if where == "gradient":
        engine.units[1].unit.grad[3] = broken
    result = update(engine, broken if where == "loss" else 1.0)
    assert result.skipped
    assert engine.optimizer.updates == 0
    assert engine.optimizer.learning_rate == run.recipe.learning_rate_at(0)
    assert all(torch.equal(u.unit.master, old) for u, old in zip(engine.units, before, strict=True))


def test_the_step_after_a_skipped_one_is_the_one_that_was_skipped() -> None:
    run = CaseSpec("dp=1").case().run
    run = replace(run, recipe=replace(run.recipe, warmup=5))
    engine = build_engine(run, build_mesh(run.layout, CPU))
    assert update(engine, math.nan).skipped
    assert not update(engine, 1.0).skipped
    assert engine.optimizer.updates == 1
