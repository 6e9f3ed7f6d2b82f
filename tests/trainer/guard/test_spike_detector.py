"""A spike stands out from the steps before it; noise, drift and outliers of gradients do not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.run import Recipe
from phalanx.trainer.guard.spikes import LEAST, MOST_IN_A_ROW, SpikeDetector


def detector(policy: str = "tell", steps: int = 40, seed: int = 0) -> SpikeDetector:
    """One that has seen ordinary steps."""
    found = SpikeDetector(Recipe(spike=policy))
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        assert found.note(2.0 + 0.02 * rng.normal(), 0.5 * math.exp(0.3 * rng.normal())) is None
    return found


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [
        (20.0, 0.5, "loss"),
        (2.5, 0.5, "loss"),
        (math.nan, 0.5, "loss"),
        (math.inf, 0.5, "loss"),
        (2.0, 50.0, "gradient norm"),
        (2.0, math.inf, "gradient norm"),
    ],
)
def test_what_stands_out_is_named_with_what_was_usual(loss: float, norm: float, what: str) -> None:
    found = detector().note(loss, norm)
    assert found is not None
    assert found.what == what
    assert found.median == pytest.approx(2.0 if what == "loss" else 0.5, rel=0.2)
    assert what in str(found)


@pytest.mark.parametrize(("loss", "norm"), [(2.0, 0.5), (2.1, 0.5), (1.0, 0.5), (2.0, 3.0)])
def test_what_does_not_stand_out_is_not(loss: float, norm: float) -> None:
    assert detector().note(loss, norm) is None


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_in_ten_thousand_steps_of_an_ordinary_run_nothing_stands_out(
    noise: float, seed: int
) -> None:
    """A loss that falls from 10 to 2, with the noise of its batches; norms with heavy tails."""
    found, rng = SpikeDetector(Recipe()), np.random.default_rng(seed)
    for step in range(10_000):
        loss = 2 + 8 / (1 + step / 50) + noise * rng.normal()
        norm = (0.3 + 5 / (1 + step / 20)) * math.exp(0.4 * rng.normal())
        assert found.note(loss, norm) is None, step


def test_before_enough_steps_only_what_is_not_finite_stands_out() -> None:
    found = detector(steps=LEAST - 1)
    assert found.find(1e9, 1e9) is None
    assert found.find(math.nan, 1.0) is not None
    assert SpikeDetector(Recipe()).find(math.nan, 1.0) is not None


def test_what_stands_out_is_not_remembered_as_usual() -> None:
    found = detector()
    for _ in range(MOST_IN_A_ROW):
        assert found.note(20.0, 0.5) is not None


def test_another_level_is_no_spike_once_it_stays() -> None:
    found = detector()
    spikes = [found.note(20.0, 0.5) for _ in range(MOST_IN_A_ROW + 100)]
    assert [spike is not None for spike in spikes] == [True] * MOST_IN_A_ROW + [False] * 100
    assert found.note(200.0, 0.5) is not None


def test_off_looks_at_nothing_and_keeps_nothing() -> None:
    found = detector("off")
    assert found.note(math.nan, math.nan) is None
    assert found.state() == {}


def test_only_skip_keeps_weights_where_they_are() -> None:
    vetoes = {policy: detector(policy).vetoes(20.0, 0.5) for policy in ("tell", "skip", "rollback")}
    assert vetoes == {"tell": False, "skip": True, "rollback": False}
    assert not detector("skip").vetoes(2.0, 0.5)


@given(
    st.integers(0, 100),
    st.integers(0, 12),
    st.lists(st.floats(0, 30), min_size=1, max_size=20),
)
def test_one_that_goes_on_from_a_checkpoint_says_the_same(
    steps: int, spikes: int, losses: list[float]
) -> None:
    one, other = detector(steps=steps), SpikeDetector(Recipe())
    for _ in range(spikes):
        one.note(1e6, 1e6)
    other.restore(one.state())
    assert [one.note(loss, 0.5) for loss in losses] == [other.note(loss, 0.5) for loss in losses]
    assert one.state() == other.state()
