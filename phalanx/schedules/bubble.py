"""How long pipeline ranks stand idle in a step, as the papers count it.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank; F forward, I and W the halves of
backward and B = I + W, in seconds of one micro-batch through all layers of a rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch on one rank; the default is one unit each.

    Attributes:
        F: forward.
        I: input-gradient half of backward.
        W: weight-gradient half of backward.
        overlapped: F&B, a forward and a backward that hide each other's messages; None is F + B.
    """

    F: float = 1.0
    I: float = 1.0  # noqa: E741  # the letter of torch.distributed.pipelining
    W: float = 1.0
    overlapped: float | None = None

    @property
    def B(self) -> float:  # noqa: N802  # the letter of the legend
        """Whole backward."""
        return self.I + self.W

    @property
    def both(self) -> float:
        """F&B: a forward and a backward together."""
        return self.F + self.B if self.overlapped is None else self.overlapped


class Bubble(NamedTuple):
    """Idle time of a rank in one step, beside the time it works.

    Example:
        >>> from phalanx.schedules.registry import find_schedule
        >>> bubble = find_schedule("1f1b").bubble_of(p=4, m=8)
        >>> bubble.idle, bubble.work, bubble.over_ideal
        (9.0, 24.0, 0.375)

    Attributes:
        idle: seconds.
        work: seconds.
    """

    idle: float
    work: float

    @property
    def over_ideal(self) -> float:
        """Bubble over ideal time: (p - 1)/m for 1F1B. Narayanan et al. 2021, section 2.2.1."""
        return self.idle / self.work

    @property
    def idle_fraction(self) -> float:
        """Bubble over total time: (p - 1)/(m + p - 1) for 1F1B. Huang et al. 2018, section 2.3."""
        return self.idle / (self.idle + self.work)


UNIT = PassSeconds()


@dataclass(frozen=True)
class PaperBubble:
    """The formula of a paper for its schedule, where m is large enough to fill the pipeline.

    Attributes:
        formula: as the paper writes it, in the letters of the legend.
        idle: the seconds that it gives, from p, v and the seconds of the passes; it may raise
            RefusedError where the paper has no answer. What is below 0 counts as no bubble.
    """

    formula: str
    idle: Callable[[int, int, PassSeconds], float]
