"""What a recipe keeps in bf16 between steps, for the reference: weights, moments.

The reference computes in fp32 and rounds afterwards. It shares with the trainer only the draws of
rounding by chance, which are part of the definition.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.core.run import Recipe
from phalanx.oracle.chance import MovedByChance
from phalanx.trainer.model.parameters import Box, uniform_values


def as_kept(weights: Tensor, recipe: Recipe) -> Tensor:
    """Initial weights as a run keeps them.

    Args:
        weights: fp32, of any shape.
        recipe: of it master_weights; whatever is not fp32 keeps bf16.
    """
    return weights if recipe.master_weights == "fp32" else weights.bfloat16()


def narrow(
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, Tensor],
    update: int,
    rounding: MovedByChance | None = None,
) -> None:
    """Round moments and weights to bf16 as the recipe keeps them, in place.

    Args:
        recipe: of it moments, master_weights and, for rounding by chance, the seed.
        optimizer: one with both moments of Adam, if they are to be narrow; rounded to nearest.
        weights: whole parameters by global name; rounded to nearest, or by chance.
        update: how many there have been, this one included; the draws depend on it.
        rounding: rounds some elements of moments otherwise.
    """
    with torch.no_grad():
        if recipe.moments == "bf16":
            for state in optimizer.state.values():
                for moment in (state["exp_avg"], state["exp_avg_sq"]):
                    wide = rounding.neighbour(moment, torch.bfloat16) if rounding else moment
                    moment.copy_(wide.bfloat16())
        for name, w in weights.items():
            if recipe.master_weights == "none":
                w.copy_(w.bfloat16())
            elif recipe.master_weights == "stochastic":
                key = f"{recipe.seed}/rounding/{update}/{name}"
                everything = Box((0,) * w.dim(), tuple(w.shape))
                w.copy_(by_chance(w, uniform_values(key, tuple(w.shape), everything)))


def by_chance(w: Tensor, chance: Tensor) -> Tensor:
    """One of the two nearest numbers of 8 significant bits, away from zero if chance is high.

    A number goes to the farther one as often as it lies beyond the nearer, so its mean stays.

    Args:
        w: numbers of any shape.
        chance: of the same shape, uniform in (0, 1).

    Returns:
        fp64; every value is a bf16 number.

    Example:
        >>> by_chance(torch.tensor([1.0, 1.001]), torch.tensor([0.9, 0.9])).tolist()
        [1.0, 1.0078125]
    """
    spacing = 2.0 ** (torch.frexp(w.double())[1] - 8)
    inner = (w.double() / spacing).trunc()
    beyond = (w.double() / spacing - inner).abs()
    outer = inner + w.sign() * (chance >= 1 - beyond)
    return outer * spacing
