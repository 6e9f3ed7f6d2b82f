"""Weights and moments in 16 bits: what is lost, and what rounding by chance brings back."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.run import Recipe
from phalanx.cost.refusals import refuse
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.sixteen_bits import by_chance
from phalanx.oracle.verify import default_case
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.precision.narrow import round_by_chance

CPU = torch.device("cpu")
STEADY = {"decay": "constant", "warmup": 0, "learning_rate": 1e-3, "weight_decay": 0.0}


def trained(steps: int, **recipe: object) -> tuple[Engine, list[float]]:
    tables = {"model": {"layers": 2}, "recipe": {"seq": 16, **STEADY, **recipe}}
    case = default_case(Layout.parse("precision=bf16 mb=8"), tables)
    engine = build_engine(case.run, build_mesh(case.run.layout, CPU))
    batch = case.stream().batch(0, engine.positions())
    return engine, [train_step(engine, step, batch).loss for step in range(steps)]


def weights_of_norms(engine: Engine) -> Tensor:
    """As products read them; they start at one."""
    found = [
        unit.unit.weights[slot.start : slot.stop]
        for unit in engine.units
        for slot in unit.unit.slots
        if "norm" in slot.declaration.name
    ]
    return torch.cat(found).float()


def test_bf16_weights_stop_moving_without_fp32_masters_or_rounding_by_chance() -> None:
    """An update of 1e-3 on a weight of one is less than half the spacing of bf16 below one, 2^-9.

    Fifteen of them are several spacings, and arrive where somebody remembers them.
    """
    engines, losses = {}, {}
    for kept in ("fp32", "none", "stochastic"):
        engines[kept], losses[kept] = trained(15, master_weights=kept)
    moved = {kept: (weights_of_norms(engine) - 1).abs() for kept, engine in engines.items()}
    assert moved["none"].max() == 0
    assert moved["fp32"].max() > 0.01
    assert moved["stochastic"].mean() == pytest.approx(moved["fp32"].mean().item(), rel=0.2)
    assert engines["none"].units[1].unit.master.dtype == torch.bfloat16
    assert engines["stochastic"].units[1].unit.master.dtype == torch.bfloat16


def test_rounding_by_chance_is_right_on_average_and_never_far() -> None:
    w = torch.tensor([1.003, -0.3, 1e-20, 257.0])
    draws = (torch.arange(10_000).unsqueeze(1) + 0.5) / 10_000
    rounded = round_by_chance(w.expand(10_000, 4), draws.expand(-1, 4)).float()
    assert torch.allclose(rounded.mean(0), w, rtol=1e-5)
    assert ((rounded - w).abs() < w.abs() * 2**-7).all()
    exact = torch.tensor([1.0, -0.5, 3.0])
    assert torch.equal(round_by_chance(exact, torch.full((3,), 0.99999)).float(), exact)


def test_the_reference_rounds_by_chance_alike_though_it_knows_no_bits() -> None:
    torch.manual_seed(0)
    w, chance = torch.randn(50_000) * 0.02, torch.rand(50_000, dtype=torch.float64)
    assert torch.equal(round_by_chance(w, chance).double(), by_chance(w, chance))


def test_moments_in_bf16_take_half_the_bytes_and_learn_as_well() -> None:
    wide, expected = trained(15)
    engine, losses = trained(15, moments="bf16")
    assert losses[-1] == pytest.approx(expected[-1], rel=0.02)
    unit = engine.units[1].unit
    for name, moment in engine.optimizer.moments(unit).items():
        assert moment.dtype == torch.bfloat16
        full = wide.optimizer.moments(wide.units[1].unit)[name]
        assert moment.nbytes == full.nbytes // 2
        assert torch.allclose(moment.float(), full, rtol=0.1, atol=0.05 * full.abs().max())


def test_weights_that_are_not_bf16_are_not_kept_in_bf16_alone() -> None:
    case = CaseSpec("precision=fp32", ("stochastic",)).case()
    with pytest.raises(RefusedError, match="use precision=bf16"):
        refuse(case.run)


def test_sgd_has_no_moments_to_narrow() -> None:
    with pytest.raises(UsageError, match="optimizer=adamw"):
        replace(Recipe(), optimizer="sgd", moments="bf16")
