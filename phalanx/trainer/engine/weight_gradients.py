"""Gradients of weights now or later: the half of a backward for which only the optimizer waits.

The stage before waits for the gradient of a product's input, but nobody for that of its weight.
So a schedule may split a backward into I, which goes through the layers, and W, which makes up
for the weights whenever the rank would idle (Qi et al. 2024, arXiv:2401.10241, section 2).

A layer hands the gradients of its weights over as `GradientWork`. Whether that is done at once or
deferred to W is decided in this file alone.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class GradientWork(Protocol):
    """What is left to do for the gradients of a few weights, with the tensors that it takes."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The parameters, as the modules hold them."""

    def start(self) -> None:
        """Send off the messages that it needs."""

    def finish(self) -> tuple[Tensor, ...]:
        """Wait for them and compute one gradient for each weight."""


class Owner(Protocol):
    """Who accumulates the gradients of some parameters: a unit."""

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add to the gradient of a parameter.

        Args:
            index: of the parameter, as `adopt` counts them.
            grad: of the parameter's shape.
        """

    def passed(self, index: int) -> None:
        """Note that this backward needs nothing more of parameter `index`."""


class ReadyGradient:
    """Work that is done: the gradient of a vector, which I finds on its way."""

    def __init__(self, weight: Tensor, grad: Tensor) -> None:
        self.weights, self._grad = (weight,), grad

    def start(self) -> None:
        """Nothing has to be sent."""

    def finish(self) -> tuple[Tensor, ...]:
        """The gradient as it was found."""
        return (self._grad,)


Deferred = deque[GradientWork]


class WeightGradients:
    """Does the work of one stage's weights at once, or defers it while a backward says so."""

    def __init__(self) -> None:
        self._owners: dict[Tensor, tuple[Owner, int]] = {}
        self._deferred: Deferred | None = None

    def adopt(self, owner: Owner, parameters: Sequence[Tensor]) -> None:
        """Let `owner` accumulate the gradients of these parameters.

        Args:
            owner: is told of each gradient by the parameter's index in this row.
            parameters: as the modules of this stage hold them.
        """
        for index, parameter in enumerate(parameters):
            self._owners[parameter] = owner, index

    @property
    def defers(self) -> bool:
        """Whether work is deferred: the backward is an I."""
        return self._deferred is not None

    def start(self, work: GradientWork) -> None:
        """Send off the messages of some work, unless it will be deferred."""
        if self._deferred is None:
            work.start()

    def finish(self, work: GradientWork) -> tuple[Tensor | None, ...]:
        """Do some work, or defer it. Called when nothing more is done with the weights themselves.

        Returns:
            What autograd's backward returns for the weights: their gradients, or None for each.
        """
        if self._deferred is None:
            return work.finish()
        self._deferred.append(work)
        for weight in work.weights:
            owner, index = self._owners[weight]
            owner.passed(index)
        return (None,) * len(work.weights)

    @contextmanager
    def deferring(self) -> Iterator[Deferred]:
        """Inside, work is deferred to the queue that this yields: the backward is an I."""
        self._deferred = Deferred()
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def do(self, deferred: Deferred) -> None:
        """Do what an I has deferred, in its order: this is the W. The queue is empty afterwards.

        The messages of the next work travel while this one is computed.
        """
        left = Counter(weight for work in deferred for weight in work.weights)
        with torch.no_grad():
            for work in _started_ahead(deferred):
                for weight, grad in zip(work.weights, work.finish(), strict=True):
                    owner, index = self._owners[weight]
                    owner.accumulate(index, grad)
                    left[weight] -= 1
                    if not left[weight]:  # a tied table has work from both ends of the model
                        owner.passed(index)


def _started_ahead(deferred: Deferred) -> Iterator[GradientWork]:
    """Take work from the queue, the next already started."""
    if deferred:
        deferred[0].start()
    while deferred:
        work = deferred.popleft()
        if deferred:
            deferred[0].start()
        yield work
