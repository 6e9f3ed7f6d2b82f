"""The columns that closed formulas of pipelines take, and what several of them share.

A formula is the longest chain of actions that wait for each other, read off played schedules. It
is exact where all stages cost the same and nothing has to be carried.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank; F, I, W seconds of one stage.
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SHOWN = 0.35  # of the bubble of a V shows, however uneven its ranks: by trials


@dataclass(frozen=True)
class Seconds:
    """Three passes of one micro-batch, of every row.

    Attributes:
        F: seconds of the forward.
        I: seconds of the input-gradient half of backward.
        W: seconds of its weight-gradient half.
    """

    F: Floats
    I: Floats  # noqa: E741  # the letter of the legend
    W: Floats

    def plus(self, other: "Seconds") -> "Seconds":
        """Both, one after the other."""
        return Seconds(self.F + other.F, self.I + other.I, self.W + other.W)

    def times(self, count: Integers | Floats) -> "Seconds":
        """All of it so many times."""
        return Seconds(self.F * count, self.I * count, self.W * count)

    def take(self, which: Integers | slice) -> "Seconds":
        """Some of the rows."""
        return Seconds(self.F[which], self.I[which], self.W[which])

    @property
    def each(self) -> tuple[Floats, Floats, Floats]:
        """F, I and W."""
        return self.F, self.I, self.W

    @property
    def total(self) -> Floats:
        """All three."""
        result: Floats = self.F + self.I + self.W
        return result


@dataclass(frozen=True)
class Pipes:
    """Pipelines by column.

    Attributes:
        p, m, v: sizes.
        passes: seconds of one micro-batch on one stage, on average over the stages.
        worst: seconds of one micro-batch on the busiest rank, all its stages together.
        total: seconds of one micro-batch on all stages together.
        hop: seconds to carry one tensor to another rank.
    """

    p: Floats
    m: Floats
    v: Floats
    passes: Seconds
    worst: Floats
    total: Floats
    hop: Floats

    def take(self, which: slice) -> "Pipes":
        """Some of them."""
        p, m, v, worst, total, hop = (
            column[which] for column in (self.p, self.m, self.v, self.worst, self.total, self.hop)
        )
        return Pipes(p, m, v, self.passes.take(which), worst, total, hop)

    @property
    def filled(self) -> Floats:
        """(m - 1) / (p - 1): how far the micro-batches fill the ranks once, or more than once."""
        return (self.m - 1) / np.maximum(self.p - 1, 1)


@dataclass(frozen=True)
class Peaks:
    """Pipeline ranks by column, as formulas of what they hold take them.

    Attributes:
        p, m, v: sizes.
        rank: the place in the pipeline, from 0.
    """

    p: Integers
    m: Integers
    v: Integers
    rank: Integers


def largest(terms: tuple[Floats, ...]) -> Floats:
    """The greatest of several columns in every row."""
    return reduce(np.maximum, terms)


def smallest(terms: tuple[Integers, ...]) -> Integers:
    """The least of several columns in every row."""
    return reduce(np.minimum, terms)


def around(x: Pipes) -> Floats:
    """One micro-batch through all stages and back, with what has to be carried."""
    return x.total + 2 * (x.p - 1) * x.hop


def with_bubble(x: Pipes, bubble: Floats) -> Floats:
    """The busiest rank works without a break but for a bubble, in seconds.

    Args:
        x: pipelines, one to a row.
        bubble: seconds that its first rank waits.
    """
    return (x.m - 1) * x.worst + x.total / x.p + bubble + 2 * (x.p - 1) * x.hop


def with_bubble_of_v(x: Pipes, bubble: Floats) -> Floats:
    """The same where stages form a V: its first rank works longest, while the others idle.

    Args:
        x: pipelines, one to a row.
        bubble: seconds that its first rank waits.
    """
    average = x.total / x.p
    left = np.maximum(bubble - x.m * (x.worst - average), SHOWN * bubble)
    return x.m * x.worst + left + 2 * (x.p - 1) * x.hop
