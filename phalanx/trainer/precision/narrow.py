"""AdamW whose moments, or weights too, are kept in 16 bits and widened only while they move.

Weights without an fp32 copy stop moving under small updates: an addend below half the spacing of
bf16, 2^-9 of a weight, rounds to nothing. Rounded up or down by chance, in proportion to what is
lost, they arrive on average (Gupta et al. 2015, arXiv:1502.02551). The chance is a function of
(seed, update, parameter, element), so that every layout rounds alike.

Moments in bf16 with fp32 master weights: DeepSeek-AI 2024 (arXiv:2412.19437), section 3.3.3. The
second one can only shrink by more than half a spacing: beta2 has to stay below 1 - 2^-8.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.core.run import Recipe
from phalanx.trainer.engine.unit import Unit
from phalanx.trainer.model.parameters import uniform_values

MOMENT_DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # None is that of gradients


class Stretch(NamedTuple):
    """Neighbouring elements of a unit that are treated alike.

    Attributes:
        unit: that they belong to.
        start, stop: in its master weights.
        part: those weights, as they are kept.
        decays: whether weight decay applies.
    """

    unit: Unit
    start: int
    stop: int
    part: Tensor
    decays: bool

    @property
    def grad(self) -> Tensor:
        """Of these weights, wide."""
        return self.unit.grad[self.start : self.stop]


WeightRounding = Callable[[Stretch, Tensor, int], Tensor]  # of new weights, after so many updates


class NarrowAdamW:
    """Decoupled weight decay and Adam; with the parts of torch's optimizers that ours looks at.

    Attributes:
        param_groups: one, whose "lr" the next step uses.
        state: of each stretch, by its weights: "step", "exp_avg" and "exp_avg_sq".
    """

    def __init__(self, recipe: Recipe, stretches: Sequence[Stretch]) -> None:
        self.recipe, self.stretches = recipe, stretches
        self.param_groups: list[dict[str, Any]] = [{"lr": recipe.learning_rate}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._round = stochastic(recipe.seed) if recipe.master_weights == "stochastic" else nearest

    def step(self) -> None:
        """Move every stretch."""
        for stretch in self.stretches:
            if not self.state.get(stretch.part):
                self.state[stretch.part] = self._first_state(stretch)
            self._move(stretch, self.state[stretch.part])

    def _first_state(self, stretch: Stretch) -> dict[str, Tensor]:
        dtype = MOMENT_DTYPES[self.recipe.moments] or stretch.grad.dtype
        moments = (torch.zeros_like(stretch.grad, dtype=dtype) for _ in range(2))
        first, second = moments
        return {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}

    def _move(self, stretch: Stretch, state: dict[str, Tensor]) -> None:
        """Loshchilov and Hutter 2017 (arXiv:1711.05101), algorithm 2; all of it in fp32."""
        recipe, lr, g = self.recipe, self.param_groups[0]["lr"], stretch.grad
        state["step"] += 1
        t = state["step"].item()
        m = state["exp_avg"].to(g.dtype).lerp(g, 1 - recipe.beta1)
        v = (state["exp_avg_sq"].to(g.dtype) * recipe.beta2).addcmul_(g, g, value=1 - recipe.beta2)
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)
        decay = recipe.weight_decay if stretch.decays else 0.0
        w = stretch.part.to(g.dtype) * (1 - lr * decay)
        size = v.sqrt_().div_(math.sqrt(1 - recipe.beta2**t)).add_(recipe.eps)
        w.addcdiv_(m, size, value=-lr / (1 - recipe.beta1**t))
        stretch.part.copy_(self._round(stretch, w, int(t)))


def nearest(stretch: Stretch, w: Tensor, update: int) -> Tensor:
    """Rounded as storing rounds.

    Args:
        stretch: that the weights belong to; makes no difference here.
        w: new weights in the dtype of gradients, returned as they are.
        update: how many there were; makes no difference either.
    """
    return w


def stochastic(seed: int) -> WeightRounding:
    """Rounded to bf16, up with the probability of what is left above the lower neighbour."""

    def rounded(stretch: Stretch, w: Tensor, update: int) -> Tensor:
        draws = torch.cat(list(_draws(stretch, f"{seed}/rounding/{update}")))
        return round_by_chance(w.float(), draws.to(w.device))

    return rounded


def _draws(stretch: Stretch, key: str) -> Iterator[Tensor]:
    """A number in (0, 1) for each element, whichever rank holds it."""
    unit = stretch.unit
    for slot, start, stop in unit.pieces(unit.low + stretch.start, unit.low + stretch.stop):
        name, shape = slot.declaration.name, slot.declaration.shape
        drawn = uniform_values(f"{key}/{name}", shape, slot.box).flatten()
        yield drawn[start - slot.start : stop - slot.start]


def round_by_chance(w: Tensor, draws: Tensor) -> Tensor:
    """Finite fp32 to bf16: add up to one spacing below the bits that are cut, and cut them.

    Args:
        w: of any shape.
        draws: like w, a number in (0, 1) for each; w is rounded away from zero with the probability
            of what is cut off, as a share of the spacing.
    """
    bits = w.contiguous().view(torch.int32) + (draws * 2**16).int()
    return (bits & -(2**16)).view(torch.float32).bfloat16()
