import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.planner.estimate import estimate
from phalanx.planner.goodput import DAY, HOUR, Conditions, campaign

LLAMA = load.model("llama-3.1-405b")
PRICED = estimate(
    LLAMA,
    load.cluster("h100x16384"),
    Layout.parse("dp=128 pp=16 tp=8 schedule=interleaved v=4 recompute=full"),
    8192,
    2048,
)


def test_llama_3s_failures_come_every_three_hours_and_leave_over_90_percent():
    whole = campaign(LLAMA, PRICED, 15.6e12, Conditions())
    assert whole.between / HOUR == pytest.approx(54 * 24 / 419)
    assert 0.90 < whole.share < 0.95
    assert whole.write == pytest.approx(2.5, abs=0.1)  # 12 bytes per parameter at 2 TB/s
    assert whole.failures == pytest.approx(whole.seconds / DAY * 419 / 54)


def test_time_is_steps_over_the_share_that_trains_and_the_price_is_per_device_hour():
    whole = campaign(LLAMA, PRICED, 15.6e12, Conditions(price=2.5))
    assert whole.steps == math.ceil(15.6e12 / (2048 * 8192))
    assert whole.training_seconds == whole.steps * PRICED.step_seconds
    assert whole.seconds == pytest.approx(whole.training_seconds / whole.share)
    assert whole.device_hours == pytest.approx(16384 * whole.seconds / HOUR)
    assert whole.cost == pytest.approx(2.5 * whole.device_hours)


@given(st.floats(1e9, 1e14), st.floats(1e3, 1e7))
def test_more_tokens_and_more_failures_never_make_it_shorter(tokens: float, hours: float):
    one = campaign(LLAMA, PRICED, tokens, Conditions(device_hours=hours * 10))
    assert campaign(LLAMA, PRICED, 2 * tokens, one.conditions).seconds >= one.seconds
    often = Conditions(device_hours=hours * 5)
    assert campaign(LLAMA, PRICED, tokens, often).seconds >= one.seconds


def test_without_failures_only_checkpoints_are_lost():
    whole = campaign(LLAMA, PRICED, 1e12, Conditions(device_hours=1e15))
    assert whole.share == pytest.approx(1.0, abs=1e-3)


def test_what_is_assumed_is_said_with_its_numbers():
    lines = campaign(LLAMA, PRICED, 1e12, Conditions()).assumptions()
    assert lines == (
        "one failure in 50,677 device-hours, so every 3.09 h; 10 min to restart",
        "a checkpoint of 12 bytes per parameter stops training for 2.44 s at 2 TB/s, "
        "every 3.85 min",
        "a failure costs 11.9 min on average: half of what lies between two checkpoints, and "
        "the restart",
    )


@pytest.mark.parametrize("values", [{"price": -1.0}, {"device_hours": 0.0}, {"restart": math.nan}])
def test_conditions_that_cannot_be_are_refused(values: dict[str, float]):
    with pytest.raises(UsageError):
        Conditions(**values)


@pytest.mark.parametrize("tokens", [0.0, -1.0, math.inf, math.nan])
def test_a_training_of_no_tokens_is_refused(tokens: float):
    with pytest.raises(UsageError, match="tokens to train on"):
        campaign(LLAMA, PRICED, tokens, Conditions())


def test_failures_that_leave_no_time_to_train_are_said_so():
    with pytest.raises(UsageError, match="training never advances"):
        campaign(LLAMA, PRICED, 1e12, Conditions(device_hours=10.0, restart=86400.0))
