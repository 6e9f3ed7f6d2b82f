"""A whole training with one layout: how long it takes with failures, and what it costs."""

from typing import Any

from phalanx.api.names import tokens_of
from phalanx.api.requests import LARGEST
from phalanx.core.errors import UsageError
from phalanx.core.estimate import Estimate
from phalanx.core.model import ModelShape
from phalanx.planner.goodput import Campaign, Conditions, campaign


def whole_training(
    shape: ModelShape, found: Estimate, tokens: str | float, conditions: Conditions | None = None
) -> Campaign:
    """How long a whole training takes with a layout, and what it costs.

    Args:
        shape: the model.
        found: the price of a step.
        tokens: to train on: a number, or a text such as 15T.
        conditions: what is assumed about failures, storage and prices.

    Raises:
        UsageError: no tokens, or failures so frequent that training never advances.
    """
    wanted, assumed = tokens_of(tokens, "--train-tokens"), conditions or Conditions()
    for name, value in (("train_tokens", wanted), ("price", assumed.price)):
        if not value <= LARGEST[name]:
            raise UsageError(f"{name} is {value:g}; it can be at most {LARGEST[name]:.0e}")
    return campaign(shape, found, wanted, assumed)


def training_record(whole: Campaign) -> dict[str, Any]:
    """A whole training as a document tells it."""
    conditions = whole.conditions
    return {
        "tokens": whole.tokens,
        "steps": whole.steps,
        "training_seconds": whole.training_seconds,
        "goodput": whole.share,
        "checkpoint_interval_seconds": whole.interval,
        "checkpoint_write_seconds": whole.write,
        "failure_interval_seconds": whole.between,
        "seconds": whole.seconds,
        "device_hours": whole.device_hours,
        "cost": whole.cost,
        "assumptions": {
            "device_hours_per_failure": conditions.device_hours,
            "restart_seconds": conditions.restart,
            "storage_bytes_per_second": conditions.storage,
            "price_per_device_hour": conditions.price,
        },
    }
