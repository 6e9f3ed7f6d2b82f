"""How far a layout may be from one device: in fp64 a fixed little, else what rounding explains.

In fp64 both sides round in the sixteenth digit, and anything that shows is a fault. In every other
format what rounding does depends on the model, its size and its weights, so it is measured
(`rounding.py`), and an error may be a few times as large as the largest that was drawn.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.oracle.reference import ReferenceStep
from phalanx.oracle.rounding import Deviation, Noise

# Of fp64, as shares: |x - ref| / |ref| of numbers, ||x - ref|| / ||ref|| of tensors, and the
# largest difference of an element over the largest element.
NUMBER, TENSOR, ELEMENT = 1e-10, 1e-10, 1e-8
# A gradient below this share of the whole model's is rounding and nothing else. The bias of the
# keys has such a one, since softmax does not see it. Under AdamW, which divides by it, the weights
# of such a tensor may drift.
ALL_ROUNDING = 1e-15

# How many times the largest deviation of a few draws an error may be: in norm and in an element.
# The norm of a gradient adds up many roundings and hardly varies. A single element varies more, and
# so does a weight under AdamW, which divides by gradients: those near zero decide.
GRADIENT, WEIGHT, NUMBER_FACTOR = (2.0, 4.0), (4.0, 6.0), 4.0

# Rounding that moves the gradient by more of its norms than this decides what is learned.
CHAOS = 4.0
# In fp32 a weight may always be off by this share of its norm, however little draws moved it.
SINGLE = 1e-5

_SUMS = 8 * torch.finfo(torch.float32).eps  # losses of tokens are added up in fp32
_SMALLEST = 1e-300  # keeps a division by the norm of a tensor of zeros finite


class Limit(NamedTuple):
    """How far one tensor may be off.

    Attributes:
        size: its elements.
        norm, largest: what differences are divided by: ||ref||, and its largest element.
        off, element: the largest such shares that are allowed, of the norm and of an element.
    """

    size: int
    norm: float
    largest: float
    off: float
    element: float


@dataclass(frozen=True)
class StepLimits:
    """How far one step may be off, by global parameter name.

    Attributes:
        loss, grad_norm: the largest differences.
        grads, weights: of every parameter.
        overflows: the reference skipped the step: it has no gradients, and no weight moves.
    """

    loss: float
    grad_norm: float
    grads: dict[str, Limit]
    weights: dict[str, Limit]
    overflows: bool = False


def fixed_limits(steps: Iterable[ReferenceStep]) -> list[StepLimits]:
    """The limits of steps in fp64: `NUMBER` of numbers, `TENSOR` and `ELEMENT` of tensors.

    A weight whose gradient has been rounding and nothing else in some step may drift from then on.

    Args:
        steps: of the reference, in order.
    """
    found, drifts = [], set[str]()
    for step in steps:
        least = max(ALL_ROUNDING * step.grad_norm / TENSOR, _SMALLEST)
        drifts |= {name for name, g in step.grads.items() if _is_rounding(g, step.grad_norm)}
        found.append(
            StepLimits(
                loss=NUMBER * max(abs(step.loss), 1e-14),
                grad_norm=NUMBER * max(abs(step.grad_norm), 1e-14),
                grads={name: _limit(g, least, (TENSOR, ELEMENT)) for name, g in step.grads.items()},
                weights=dict(_fixed_weights(step.weights, drifts)),
                overflows=not step.finite,
            )
        )
    return found


def _is_rounding(grad: Tensor, grad_norm: float) -> bool:
    return 0 < float(grad.double().norm()) <= ALL_ROUNDING * grad_norm


def _fixed_weights(
    weights: Mapping[str, Tensor], drifts: Iterable[str]
) -> Iterator[tuple[str, Limit]]:
    """Elements count as at least as large as the model's: biases start at zero."""
    typical = _root_mean_square(weights.values())
    for name, w in weights.items():
        least = math.inf if name in drifts else typical * math.sqrt(w.numel())
        yield name, _limit(w, least, (TENSOR, ELEMENT))


def measured_limits(
    steps: Sequence[ReferenceStep],
    noise: Sequence[Noise],
    compute: torch.dtype,
    rate: float,
) -> list[StepLimits]:
    """Of any other format.

    Args:
        steps: of the reference.
        noise: what rounding explains of each.
        compute: the format of weights and activations.
        rate: how far AdamW moves a weight whose gradient may have either sign; 0 without it.
    """
    eps, unsure, found = torch.finfo(compute).eps, Counter[str](), []
    for step, one in zip(steps, noise, strict=True):
        for name, grad in step.grads.items():
            unsure[name] += int((grad.abs() < GRADIENT[1] * one.grads[name].element).sum())
        # both ways, each for itself
        either = {name: 2 * rate * math.sqrt(count) for name, count in unsure.items()}
        found.append(_measured(step, one, eps, either))
    return found


def chaotic(steps: Sequence[ReferenceStep], noise: Sequence[Noise]) -> list[str]:
    """Why nothing can be told of a run, where rounding alone decides what it learns; else nothing.

    Args:
        steps: of the reference.
        noise: what rounding explains of each.
    """
    for number, (step, one) in enumerate(zip(steps, noise, strict=True), 1):
        moved = _total(one)
        if moved > CHAOS * step.grad_norm > 0:
            return [
                f"step {number}: rounding alone moves the gradient by {moved / step.grad_norm:.1f} "
                "times its norm, so nothing can be told; use a smaller recipe.learning_rate, or "
                f"--steps {max(number - 1, 1)}"
            ]
    return []


def _total(noise: Noise) -> float:
    """The norm of what rounding explains of the whole gradient."""
    return math.sqrt(sum(deviation.norm**2 for deviation in noise.grads.values()))


def _measured(
    step: ReferenceStep, noise: Noise, eps: float, either: Mapping[str, float]
) -> StepLimits:
    total = _total(noise)
    least = 1e-3 * eps * step.grad_norm  # of a gradient that is nothing but rounding
    typical = _root_mean_square(step.weights.values())
    return StepLimits(
        loss=NUMBER_FACTOR * noise.loss + (eps / 8 + _SUMS) * abs(step.loss),
        grad_norm=NUMBER_FACTOR * noise.grad_norm + total,
        grads={
            name: _explained(g, noise.grads[name].times(GRADIENT), least, step.grad_norm * eps)
            for name, g in step.grads.items()
        },
        weights={
            # one more unit in the last place, since weights are compared as they are rounded
            name: _at_least(
                SINGLE if eps == torch.finfo(torch.float32).eps else 0.0,
                _explained(
                    w,
                    noise.weights[name].times(WEIGHT),
                    eps * float(w.abs().max()) + either.get(name, 0.0),
                    typical,
                ),
            )
            for name, w in step.weights.items()
        },
        overflows=not step.finite,
    )


def _explained(x: Tensor, noise: Deviation, more: float, least: float) -> Limit:
    """A limit of so much noise, and a little more; shares of `least` at least."""
    limit = _limit(x, max(least, _SMALLEST), (1.0, 1.0))
    off = (noise.norm + more) / limit.norm
    element = (noise.element + more) / limit.largest
    return limit._replace(off=max(off, _SMALLEST), element=max(element, _SMALLEST))


def _at_least(share: float, limit: Limit) -> Limit:
    return limit._replace(off=max(limit.off, share), element=max(limit.element, share))


def _limit(x: Tensor, least: float, shares: tuple[float, float]) -> Limit:
    """Shares of the norm and the largest element of `x`, or of a tensor of norm `least`."""
    norm = float(torch.linalg.vector_norm(x.double()))
    largest = max(float(x.abs().max()), least / math.sqrt(x.numel()))
    return Limit(x.numel(), max(norm, least), largest, *shares)


def _root_mean_square(tensors: Iterable[Tensor]) -> float:
    squares = [(float(x.double().square().sum()), x.numel()) for x in tensors]
    return math.sqrt(sum(s for s, _ in squares) / sum(n for _, n in squares))
