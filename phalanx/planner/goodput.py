"""How long a training run takes, and what it costs, with failures and checkpoints.

Symbols: δ seconds that a checkpoint stops training, τ seconds between checkpoints, M mean seconds
between failures of the whole job, R seconds to restart.
"""

from dataclasses import dataclass
from math import ceil, inf

from phalanx.core.errors import UsageError
from phalanx.core.estimate import Estimate
from phalanx.core.model import ModelShape
from phalanx.core.units import show_rate, show_seconds
from phalanx.cost.reliability import (
    Faults,
    between_failures,
    checkpoint_bytes,
    daly_interval,
    effective_share,
    lost_per_failure,
    write_seconds,
)

DAY, HOUR = 86400.0, 3600.0

# 419 unexpected interruptions in 54 days of 16,384 H100s: arXiv:2407.21783, section 3.3.4.
DEVICE_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
# An assumption: with it, that run comes out at 92 % effective training time; they say "over 90 %".
RESTART_SECONDS = 600.0
# An assumption: 2 TB/s for 16,384 devices, a large parallel file system; fewer write less at once.
STORAGE_OF_A_DEVICE, STORAGE_MOST = 2e12 / 16384, 2e12


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is assumed about failures, storage and prices.

    Attributes:
        device_hours: of work between two failures, on average.
        restart: R, seconds.
        storage: bytes/s to which all ranks together write a checkpoint; 0 means by their number.
        price: of one device for an hour; 0 where nobody asks.
    """

    device_hours: float = DEVICE_HOURS_PER_FAILURE
    restart: float = RESTART_SECONDS
    storage: float = 0.0
    price: float = 0.0

    def __post_init__(self) -> None:
        """Reject conditions that cannot be."""
        if not self.device_hours > 0:
            raise UsageError(
                f"{self.device_hours:g} device-hours between failures; it must be positive"
            )
        for name in ("restart", "storage", "price"):
            value = getattr(self, name)
            if not 0 <= value < inf:
                raise UsageError(f"{name} is {value:g}; it must be finite and at least 0")


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A whole training run.

    Attributes:
        tokens: all of them.
        steps: how many.
        training_seconds: of the steps alone.
        share: of the wall clock that becomes training.
        interval: τ, seconds between checkpoints (Daly 2006).
        write: δ.
        between: M.
        seconds: of wall clock.
        device_hours: paid for.
        cost: of them; 0 without a price.
        conditions: what was assumed.
    """

    tokens: float
    steps: int
    training_seconds: float
    share: float
    interval: float
    write: float
    between: float
    seconds: float
    device_hours: float
    cost: float
    conditions: Conditions

    @property
    def failures(self) -> float:
        """How often the job stops, on average."""
        return self.seconds / self.between

    @property
    def lost_seconds(self) -> float:
        """What one failure costs, on average."""
        return lost_per_failure(self.interval, self.conditions.restart)

    def assumptions(self) -> tuple[str, ...]:
        """What the numbers rest on, in lines."""
        conditions = self.conditions
        return (
            f"one failure in {conditions.device_hours:,.0f} device-hours, "
            f"so every {show_seconds(self.between)}; {show_seconds(conditions.restart)} to restart",
            f"a checkpoint of 12 bytes per parameter stops training for "
            f"{show_seconds(self.write)} at {show_rate(conditions.storage, 'B')}, "
            f"every {show_seconds(self.interval)}",
            f"a failure costs {show_seconds(self.lost_seconds)} on average: half of what lies "
            "between two checkpoints, and the restart",
        )


def campaign(shape: ModelShape, found: Estimate, tokens: float, conditions: Conditions) -> Campaign:
    """How long `tokens` take with a layout.

    The checkpoint interval is Daly's, and the share of the wall clock that becomes training is
    with failures at random; see `cost/reliability.py`.

    Args:
        shape: the model.
        found: the price of the layout.
        tokens: to train on.
        conditions: what is assumed.

    Raises:
        UsageError: no tokens, or failures so frequent that no interval is ever finished.
    """
    if not 0 < tokens < inf:
        raise UsageError(f"{tokens:g} tokens to train on; it must be positive and finite")
    devices = found.layout.ranks
    storage = conditions.storage or min(STORAGE_OF_A_DEVICE * devices, STORAGE_MOST)
    write = write_seconds(checkpoint_bytes(shape.params()), storage)
    between = between_failures(devices, 1, conditions.device_hours * HOUR)
    interval = daly_interval(write, between)
    share = effective_share(interval, write, Faults(between, conditions.restart))
    if not share > 0:
        raise UsageError(
            f"with a failure every {show_seconds(between)} and {show_seconds(write)} for a "
            "checkpoint, training never advances; use more device-hours between failures"
        )
    steps = ceil(tokens / found.tokens)
    training = steps * found.step_seconds
    hours = devices * training / share / HOUR
    return Campaign(
        tokens=tokens,
        steps=steps,
        training_seconds=training,
        share=share,
        interval=interval,
        write=write,
        between=between,
        seconds=training / share,
        device_hours=hours,
        cost=hours * conditions.price,
        conditions=Conditions(
            device_hours=conditions.device_hours,
            restart=conditions.restart,
            storage=storage,
            price=conditions.price,
        ),
    )
