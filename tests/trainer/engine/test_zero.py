"""Each ZeRO stage is a policy, and offloading changes what it retains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.layout import Layout
from phalanx.trainer.engine.zero import ZeroPolicy


@pytest.mark.parametrize(
    ("line", "partitions", "gradients", "weights"),
    [
        ("dp=2 zero=0", False, True, True),
        ("dp=2 zero=1", True, True, True),
        ("dp=2 zero=2", True, False, True),
        ("dp=2 zero=3", True, False, False),
        ("dp=1 zero=3", False, True, True),  # nobody to share with
        ("dp=2 zero=1 offload=optimizer", True, False, True),
        ("dp=2 zero=1 offload=nvme", True, False, False),
    ],
)
def test_a_stage_retains_whole_what_its_paper_says(
    line: str, partitions: bool, gradients: bool, weights: bool
) -> None:
    policy = ZeroPolicy.of(Layout.parse(line))
    assert (policy.partitions, policy.retains_gradients, policy.retains_weights) == (
        partitions,
        gradients,
        weights,
    )


@given(dp=st.integers(1, 4), zero=st.integers(0, 3))
def test_a_later_stage_retains_no_more(dp: int, zero: int) -> None:
    policy = ZeroPolicy.of(Layout(dp=dp, zero=zero))
    assert policy.retains_weights or not policy.retains_gradients
    assert policy.retains_gradients or policy.partitions
    assert policy.separates_master is not policy.retains_weights


def test_without_reshard_weights_stay_until_the_step_ends() -> None:
    assert ZeroPolicy.of(Layout(dp=2, zero=3, reshard=False)).retains_until_step_ends
    assert not ZeroPolicy.of(Layout(dp=2, zero=3)).retains_until_step_ends
