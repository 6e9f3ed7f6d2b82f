"""AdamW by torch's fused kernel, which rounds each element alike wherever it lies.

On a CPU the kernel takes what fills a vector register by one path and the rest, element by element,
by another; the two round differently in about one element of thirty. Ranks that hold copies of a
parameter may hold it at different places of different vectors, and would drift apart. Hence the
rest is moved inside a vector of its own, filled up with zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from phalanx.core.run import Recipe
from phalanx.trainer.precision.narrow import Stretch

_LANES = 64  # elements; no vector register holds more of them


class _Piece(NamedTuple):
    """What one call of the kernel moves at once.

    Attributes:
        vectors: weights, gradient and both moments, each [n].
        step: updates so far, a scalar.
    """

    vectors: Sequence[Tensor]
    step: Tensor

    @property
    def even(self) -> int:
        """How many elements fill vector registers; on other devices than a CPU, all count."""
        x = self.vectors[0]
        return len(x) - len(x) % _LANES if x.device.type == "cpu" else len(x)

    def cut(self, start: int, stop: int) -> "_Piece":
        """Views of the elements [start, stop)."""
        return _Piece([x[start:stop] for x in self.vectors], self.step)

    def filled(self) -> "_Piece":
        """Copies with zeros after them, and a count of updates of their own."""
        missing = _LANES - len(self.vectors[0])
        return _Piece([pad(x, (0, missing)) for x in self.vectors], self.step.clone())


class FusedAdamW:
    """Decoupled weight decay and Adam; with the parts of torch's optimizers that ours looks at.

    Source: Loshchilov and Hutter 2017 (arXiv:1711.05101), algorithm 2.

    Attributes:
        param_groups: one, whose "lr" the next step uses.
        state: of each stretch, by its weights: "step", "exp_avg" and "exp_avg_sq".
    """

    def __init__(self, recipe: Recipe, stretches: Sequence[Stretch]) -> None:
        self.recipe, self.stretches = recipe, stretches
        self.param_groups: list[dict[str, Any]] = [{"lr": recipe.learning_rate}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Move every stretch."""
        for decays in (False, True):
            wholes = [self._whole(s) for s in self.stretches if s.decays == decays]
            bodies = [whole.cut(0, whole.even) for whole in wholes if whole.even]
            rests = [w.cut(w.even, len(w.vectors[0])) for w in wholes if w.even < len(w.vectors[0])]
            filled = [rest.filled() for rest in rests]
            self._move([*bodies, *filled], decays)
            for rest, moved in zip(rests, filled, strict=True):
                _put_back(rest, moved)

    def _whole(self, stretch: Stretch) -> _Piece:
        state = self.state[stretch.part]
        moments = state["exp_avg"], state["exp_avg_sq"]
        return _Piece((stretch.part, stretch.grad, *moments), state["step"])

    def _move(self, pieces: Sequence[_Piece], decays: bool) -> None:
        if not pieces:
            return
        recipe = self.recipe
        weights, grads, first, second = (
            list(column) for column in zip(*(piece.vectors for piece in pieces), strict=True)
        )
        adamw(
            weights,
            grads,
            first,
            second,
            [],
            [piece.step for piece in pieces],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=recipe.beta1,
            beta2=recipe.beta2,
            lr=self.param_groups[0]["lr"],
            weight_decay=recipe.weight_decay if decays else 0.0,
            eps=recipe.eps,
        )


def _put_back(rest: _Piece, moved: _Piece) -> None:
    for x, new in zip(rest.vectors, moved.vectors, strict=True):
        x.copy_(new[: len(x)])
    rest.step.copy_(moved.step)
