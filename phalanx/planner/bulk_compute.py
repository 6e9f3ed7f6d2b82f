"""How long one device computes, for many numbers of tokens at once: `cost/compute.py`, by column.

Symbols: M, N, K sizes of a product.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.core.recompute import Recompute
from phalanx.cost.compute import FUSED_BACKWARD, TILES, Machine, Product, Scores, Work
from phalanx.planner.columns import Booleans, Floats, largest
from phalanx.planner.question import Question
from phalanx.schedules.formulas import Seconds


class Load(NamedTuple):
    """What a unit asks of a device, before it waits for kernels to be launched.

    Attributes:
        F, I, W: seconds of the three passes.
        forward, backward: number of kernels and messages.
        attention_forward, attention_backward: seconds of attention among them.
    """

    F: Floats
    I: Floats  # noqa: E741  # the letter of the legend
    W: Floats
    forward: Floats
    backward: Floats
    attention_forward: Floats
    attention_backward: Floats

    def sending(self, messages: "Messages") -> "Load":
        """With messages, which take the place of kernels where those are launched too slowly."""
        return self._replace(
            F=self.F + messages.times[0] * messages.shown[0],
            I=self.I + messages.times[1] * messages.shown[1],
            forward=self.forward + messages.times[0],
            backward=self.backward + messages.times[1],
        )

    def launched(self, launch: float) -> Seconds:
        """Seconds, where it takes so long to launch a kernel."""
        forward = np.maximum(self.F, launch * self.forward)
        backward = np.maximum(self.I + self.W, launch * self.backward)
        return Seconds(forward, backward - self.W, self.W)


class Messages(NamedTuple):
    """Equal messages: how often in forward and in backward, and how long one of them shows."""

    times: tuple[Floats | float, Floats | float]
    shown: tuple[Floats, Floats]


class Kernels:
    """The kernels of a unit, priced for several numbers of tokens.

    Args:
        question: for the device and the habits of the program.
        works: the kernels, for one sequence.
        scale: the tokens, in sequences.
    """

    def __init__(self, question: Question, works: Sequence[Work], scale: Floats) -> None:
        self._practice = question.practice
        self._works = works
        self._passes = [_passes(work, question.machine, scale) for work in works]

    def load(self, mode: Recompute, accumulation: float) -> Load:
        """All of them, and the forward that backward repeats.

        Args:
            mode: of recomputation.
            accumulation: seconds of adding the gradients of the weights up.
        """
        counts = np.array([_counts(work) for work in self._works])
        again = np.array([self._repeats(work, mode) for work in self._works])
        every, attention = self.sum(), self.sum(Scores)
        repeated = self.sum(Work, again)
        ones = np.ones_like(every.F)
        return Load(
            F=every.F,
            I=every.I + repeated.F,
            W=every.W + accumulation,
            forward=ones * counts[:, 0].sum(),
            backward=ones * (counts[:, 1].sum() + counts[again, 0].sum()),
            attention_forward=attention.F,
            attention_backward=attention.I,
        )

    def _repeats(self, work: Work, mode: Recompute) -> bool:
        """Whether recomputation repeats the forward of a kernel; see `compute.again`."""
        if mode.segment:
            last = not isinstance(work, Scores) and work.last
            return not (self._practice.stops_early and last)
        return work.part in mode.parts

    def sum(self, kind: Any = Work, among: Booleans | None = None) -> Seconds:
        """Seconds of the kernels of one kind, or of some of those."""
        total = Seconds(*np.zeros((3, len(self._passes[0].F))))
        for i, (work, seconds) in enumerate(zip(self._works, self._passes, strict=True)):
            if isinstance(work, kind) and (among is None or among[i]):
                total = total.plus(seconds)
        return total


def _counts(work: Work) -> tuple[float, float]:
    """Kernels in forward and in backward; see `compute.price`."""
    match work:
        case Product():
            return work.kernels, 2 * work.kernels
        case Scores():
            return 1, 2
        case _:
            return work.kernels, work.kernels


def _passes(work: Work, machine: Machine, scale: Floats) -> Seconds:
    """Seconds of one kernel in each pass; see `compute.price`."""
    none = np.zeros_like(scale)
    match work:
        case Product():
            M, N, K, batch = work.M * scale, work.N * (none + 1), work.K * (none + 1), work.batch
            added = machine.accumulate if work.weights else 0.0
            forward = product_seconds(machine, (M, N, K), batch)
            inputs = product_seconds(machine, (M, K, N), batch)
            weights = product_seconds(machine, (K, N, M), batch, added)
            if work.weights:
                return Seconds(forward, inputs, weights)
            return Seconds(forward, inputs + weights, none)
        case Scores():
            forward = scale * machine.scores_seconds(work.flops, first=work.first)
            return Seconds(forward, FUSED_BACKWARD * forward, none)
        case _:
            forward, backward = (
                scale * machine.sweep_seconds(size) for size in (work.forward, work.backward)
            )
            return Seconds(forward, backward, none)


def product_seconds(
    machine: Machine, sizes: tuple[Floats, Floats, Floats], batch: float, added: float = 0.0
) -> Floats:
    """Products M x K by K x N; see `compute.Machine.product_seconds`."""
    M, N, K = sizes
    rates = machine.rates
    depth = rates.depth * machine.peak / machine.wide
    reached = machine.peak * rates.product * K / (K + depth)
    arithmetic = 2 * M * N * K * batch / (reached * fill(M, N, batch, rates.cores))
    moved = batch * ((M * K + K * N + M * N) * machine.element + M * N * added)
    return np.maximum(arithmetic, moved / (machine.hbm * rates.memory))


def fill(M: Floats, N: Floats, batch: float, cores: int) -> Floats:
    """Share of the cores that are busy; see `compute.fill`."""
    if cores == 1:
        return np.ones_like(M)
    return largest(_fill(M, N, batch, cores, tile) for tile in TILES)


def _fill(M: Floats, N: Floats, batch: float, cores: int, tile: tuple[int, int, float]) -> Floats:
    rows, columns, rate = tile
    tiles = np.ceil(M / rows) * np.ceil(N / columns) * batch
    exact = M * N * batch / (rows * columns)
    result: Floats = rate * exact / (np.ceil(tiles / cores) * cores)
    return result
