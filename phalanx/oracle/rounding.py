"""How far rounding alone moves one device: the same steps again, every result moved by chance.

Each operation rounds its result to the format that it has. Another order of the same sums rounds
otherwise, and nobody is to say which is right. So the reference takes its steps several times
more, and each time the result of every operation, forward and backward, moves by up to one unit in
its last place (Monte Carlo arithmetic: Parker 1997, UCLA CSD-970002, section 4). How far loss,
gradients and weights then lie apart is what rounding explains; what lies further off is a fault.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.oracle.chance import MovedByChance
from phalanx.oracle.reference import ReferenceStep

DRAWS = 3


class Deviation(NamedTuple):
    """How far one tensor lies from the reference at most.

    Attributes:
        norm: of the difference.
        element: the largest difference of an element.
    """

    norm: float
    element: float

    def times(self, factors: tuple[float, float]) -> "Deviation":
        """So many times the norm, and so many times the element."""
        return Deviation(self.norm * factors[0], self.element * factors[1])


@dataclass(frozen=True)
class Noise:
    """What rounding explains of one step, by global parameter name.

    Attributes:
        loss, grad_norm: how far they lie apart at most.
        grads, weights: of every parameter.
        scores: of each router, by the name of its bias, the largest difference of any score.
        overflows: how many draws overflowed.
    """

    loss: float
    grad_norm: float
    grads: dict[str, Deviation]
    weights: dict[str, Deviation]
    scores: dict[str, float]
    overflows: int = 0


Draw = Callable[[MovedByChance | None], list[ReferenceStep]]


def measure(draw: Draw, compute: torch.dtype) -> tuple[list[ReferenceStep], list[Noise]]:
    """The steps of a reference, and how far rounding moves them.

    Args:
        draw: takes the steps, every result moved by what it is given.
        compute: the dtype in which weights are compared.
    """
    steps = draw(None)
    draws = [draw(MovedByChance(seed)) for seed in range(DRAWS)]
    return steps, [
        _noise(step, others, compute) for step, *others in zip(steps, *draws, strict=True)
    ]


def _noise(step: ReferenceStep, others: Sequence[ReferenceStep], compute: torch.dtype) -> Noise:
    return Noise(
        loss=max(abs(other.loss - step.loss) for other in others),
        grad_norm=max(abs(other.grad_norm - step.grad_norm) for other in others),
        grads=_deviations(step.grads, [other.grads for other in others]),
        weights=_deviations(
            _cast(step.weights, compute), [_cast(other.weights, compute) for other in others]
        ),
        scores={
            name: max(_deviation(other.scores[name], scores).element for other in others)
            for name, scores in step.scores.items()
        },
        overflows=sum(not other.finite for other in others),
    )


def _cast(tensors: Mapping[str, Tensor], compute: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(compute) for name, x in tensors.items()}


def _deviations(
    tensors: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]
) -> dict[str, Deviation]:
    found = {}
    for name, x in tensors.items():
        each = [_deviation(other[name], x) for other in others]
        found[name] = Deviation(max(d.norm for d in each), max(d.element for d in each))
    return found


def _deviation(x: Tensor, y: Tensor) -> Deviation:
    difference = (x.double() - y.double()).abs()
    return Deviation(float(difference.norm()), float(difference.max()))
