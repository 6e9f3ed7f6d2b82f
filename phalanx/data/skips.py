"""Batches that a run leaves out: which batch of the stream each step learns from.

A run that goes back before a spike of its loss skips the batches that it met there. The windows it
skipped stand in its checkpoints, so that a resumed run learns from the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class SkippedBatches(NamedTuple):
    """From step `step` on, the stream is `batches` ahead of where it would be."""

    step: int
    batches: int


@dataclass(frozen=True)
class Skips:
    """All windows that a run has skipped, by step.

    Example:
        >>> skips = Skips().jump(step=3, to=10)
        >>> [skips.batch_of(step) for step in range(6)]
        [0, 1, 2, 10, 11, 12]
    """

    windows: tuple[SkippedBatches, ...] = ()

    def batch_of(self, step: int) -> int:
        """Which batch of the stream a step learns from; both are counted from 0."""
        return step + sum(window.batches for window in self.windows if window.step <= step)

    def jump(self, step: int, to: int) -> "Skips":
        """Let `step` learn from batch `to`, and later steps from those after it.

        Windows at later steps are forgotten: those steps are done again.

        Args:
            step: from which on.
            to: batch of the stream, no earlier than that of the step before.
        """
        kept = Skips(tuple(window for window in self.windows if window.step < step))
        ahead = to - kept.batch_of(step)
        return Skips((*kept.windows, SkippedBatches(step, ahead))) if ahead else kept

    def to_json(self) -> list[list[int]]:
        """What `from_json` reads."""
        return [list(window) for window in self.windows]

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[int]]) -> "Skips":
        """Read what a checkpoint says.

        Raises:
            ValueError, TypeError: it is no list of windows.
        """
        windows = tuple(SkippedBatches(*row) for row in rows)
        for window in windows:
            if not all(type(number) is int and number >= 0 for number in window):
                raise ValueError(f"{window} is no window of batches")
        return cls(windows)
