"""Spikes: a loss or a gradient norm far above what the last steps had.

The remedy of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) is to go back to a
checkpoint about 100 steps before the spike and to skip the batches that were seen before and
during it: neither the weights nor the batches alone make it.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from phalanx.core.run import Recipe

LENGTH = 64  # steps that a new one is compared with
LEAST = 16  # of them, before anything is said
DEVIATIONS = 10.0
LEAST_RISE = {"loss": 0.1, "gradient norm": 9.0}  # above the median, as a share of it
MOST_IN_A_ROW = 10  # then it is no spike, but where the run has come to
_SIGMAS = 1.4826  # standard deviations in a median absolute deviation of normal values


class Spike(NamedTuple):
    """A step that stands out.

    Attributes:
        what: "loss" or "gradient norm".
        value: of that step.
        median: of the steps before it.
    """

    what: str
    value: float
    median: float

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return f"the {self.what} is {self.value}"
        return f"the {self.what} is {self.value:.4g}, and was {self.median:.4g} in the steps before"


class SpikeDetector:
    """Remembers the losses and norms of the last steps, and says which step stands out.

    Attributes:
        policy: of the recipe: off, tell, skip or rollback.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.policy = recipe.spike
        self._history: dict[str, list[float]] = {"loss": [], "gradient norm": []}
        self._in_a_row = 0

    def find(self, loss: float, norm: float) -> Spike | None:
        """Whether a step stands out from those before it; nothing is remembered.

        Args:
            loss: of the global batch, the same on all ranks.
            norm: of its gradient, before clipping.
        """
        if self.policy == "off" or self._in_a_row >= MOST_IN_A_ROW:
            return None
        for (what, history), value in zip(self._history.items(), (loss, norm), strict=True):
            if len(history) < LEAST and math.isfinite(value):
                continue
            middle = statistics.median(history) if history else math.nan
            if not math.isfinite(value) or value > middle + self._room(what, middle):
                return Spike(what, value, middle)
        return None

    def vetoes(self, loss: float, norm: float) -> bool:
        """Whether the weights stay where they are, though the step is finite.

        Args:
            loss: of the global batch, nats per valid token, the same on all ranks.
            norm: of its gradient, before clipping.
        """
        return self.policy == "skip" and self.find(loss, norm) is not None

    def note(self, loss: float, norm: float) -> Spike | None:
        """Say what `find` says, and remember the step, unless it stands out.

        Args:
            loss: of the global batch, nats per valid token, the same on all ranks.
            norm: of its gradient, before clipping.
        """
        found = self.find(loss, norm)
        if found is not None:
            self._in_a_row += 1
            return found
        if self._in_a_row >= MOST_IN_A_ROW:  # another level: what was before says nothing of it
            self._history = {what: [] for what in self._history}
        self._in_a_row = 0
        for history, value in zip(self._history.values(), (loss, norm), strict=True):
            if math.isfinite(value):
                history.append(value)
                del history[:-LENGTH]
        return None

    def _room(self, what: str, middle: float) -> float:
        """How far above the median is still nothing."""
        history = self._history[what]
        spread = _SIGMAS * statistics.median(abs(value - middle) for value in history)
        return max(DEVIATIONS * spread, LEAST_RISE[what] * abs(middle))

    def state(self) -> dict[str, Any]:
        """What `restore` takes; empty where nothing is watched."""
        if self.policy == "off":
            return {}
        return {"history": list(self._history.values()), "in_a_row": self._in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as after the steps that `state` remembers.

        Raises:
            ValueError, TypeError, KeyError: it is no such state.
        """
        if not state:
            return
        losses, norms = ([float(value) for value in values] for values in state["history"])
        self._history = {"loss": losses, "gradient norm": norms}
        self._in_a_row = int(state["in_a_row"])
