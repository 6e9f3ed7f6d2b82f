"""How many bytes training keeps for every parameter, and what ZeRO leaves of them on a rank.

Symbols: d ranks that share one sharded copy.
"""

from typing import NamedTuple

from phalanx.core.errors import UsageError
from phalanx.cost.table import Column


class StateBytes(NamedTuple):
    """Bytes per parameter, by what they are for.

    The defaults are mixed precision with Adam, 2 + 2 + 4 + 8 = 16: Rajbhandari et al. 2019
    (arXiv:1910.02054), section 3.1.
    """

    weights: Column = 2.0  # what the matrix products read
    gradients: Column = 2.0
    master: Column = 4.0  # the fp32 copy that the optimizer updates
    moments: Column = 8.0  # two fp32 running means of Adam

    @property
    def optimizer(self) -> Column:
        """Master copy and moments: the share that ZeRO-1 cuts."""
        return self.master + self.moments

    @property
    def total(self) -> Column:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


MIXED_ADAM = StateBytes()
MIXED_ADAM_FP32_GRADIENTS = StateBytes(gradients=4.0)  # Megatron-LM and ours: reduced in fp32
FULL_FP32_ADAM = StateBytes(weights=4.0, gradients=4.0, master=0.0)
BOOK_ADAM = StateBytes(gradients=0.0, master=0.0)  # the scaling book's 10 bytes: 2 + 8


def sharded(state: StateBytes, zero: int, d: int) -> StateBytes:
    """Bytes per parameter that stay on one of d ranks.

        zero 0    weights + gradients + optimizer             16
        zero 1    weights + gradients + optimizer / d         4 + 12/d
        zero 2    weights + (gradients + optimizer) / d       2 + 14/d
        zero 3    (weights + gradients + optimizer) / d       16/d

    Source: Rajbhandari et al. 2019 (arXiv:1910.02054), figure 1 and section 5.

    Args:
        state: bytes per parameter before anything is cut.
        zero: stage, 0 to 3.
        d: ranks that share one copy.

    Raises:
        UsageError: a stage or degree that does not exist.

    Example:
        >>> [sharded(MIXED_ADAM, zero, 64).total for zero in range(4)]
        [16.0, 4.1875, 2.21875, 0.25]
    """
    if zero not in (0, 1, 2, 3) or d < 1:
        raise UsageError(f"zero={zero} over {d} ranks; zero can be 0, 1, 2, 3 over 1 or more")
    return StateBytes(
        weights=state.weights / (d if zero >= 3 else 1),
        gradients=state.gradients / (d if zero >= 2 else 1),
        master=state.master / (d if zero >= 1 else 1),
        moments=state.moments / (d if zero >= 1 else 1),
    )


def largest_model(memory: float, state: StateBytes = MIXED_ADAM) -> float:
    """Parameters whose unsharded state fills a memory, activations left out.

    Args:
        memory: bytes.
        state: bytes per parameter.

    Example:
        >>> largest_model(80e9)
        5000000000.0
    """
    return float(memory / state.total)
