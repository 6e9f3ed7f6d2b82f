"""Torch's fused AdamW moves an element alike wherever it lies in whatever vector."""

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from phalanx.core.run import Recipe
from phalanx.trainer.engine.unit import Unit
from phalanx.trainer.precision.fused import FusedAdamW
from phalanx.trainer.precision.narrow import Stretch

RECIPE = Recipe(seq=16)
MOMENTS = ("exp_avg", "exp_avg_sq")


def moved(weights: Tensor, grads: list[Tensor], cuts: list[int]) -> Tensor:
    """Weights after one update per gradient, held in pieces that begin at `cuts`."""
    master, grad = weights.clone(), torch.zeros_like(weights)
    unit = cast(Unit, SimpleNamespace(grad=grad))
    edges = list(zip(cuts, [*cuts[1:], len(weights)], strict=True))
    stretches = [Stretch(unit, low, high, master[low:high], decays=True) for low, high in edges]
    optimizer = FusedAdamW(RECIPE, stretches)
    for low, high, part in ((s.start, s.stop, s.part) for s in stretches):
        moments = {name: torch.zeros(high - low, dtype=weights.dtype) for name in MOMENTS}
        optimizer.state[part] = {"step": torch.zeros(()), **moments}
    for one in grads:
        grad.copy_(one)
        optimizer.step()
    return master


def test_copies_of_a_parameter_at_different_places_stay_equal_bit_for_bit() -> None:
    """Ranks that cut tensors unevenly hold their copies at different places."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        count = 4096 + 5
        weights, *grads = torch.randn(4, count, dtype=dtype, generator=generator) * 0.1
        whole = moved(weights, grads, [0])
        for piece in (1, 3, 17, 64, 1000):
            assert torch.equal(moved(weights, grads, list(range(0, count, piece))), whole)


def test_it_takes_the_steps_of_torchs_own_optimizer() -> None:
    weights, *grads = torch.randn(4, 1000, dtype=torch.float64) * 0.1
    parameter = weights.clone()
    theirs = torch.optim.AdamW(
        [parameter],
        lr=RECIPE.learning_rate,
        betas=(RECIPE.beta1, RECIPE.beta2),
        eps=RECIPE.eps,
        weight_decay=RECIPE.weight_decay,
    )
    for grad in grads:
        parameter.grad = grad
        theirs.step()
    assert torch.allclose(moved(weights, grads, [0, 129]), parameter, rtol=1e-12, atol=1e-15)
