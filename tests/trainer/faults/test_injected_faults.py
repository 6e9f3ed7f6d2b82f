"""A plan does what it says, where and when it says, and nowhere else."""

import time
from collections.abc import Iterator

import pytest
import torch

from phalanx.trainer import faults
from phalanx.trainer.faults import Fault, FaultPlan


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    faults.unload()


def load(*planned: Fault, rank: int = 0, attempt: int = 0) -> None:
    faults.load(FaultPlan(planned), rank, attempt)


def test_a_fault_comes_at_its_point_step_rank_and_attempt_and_once():
    fault = Fault(point="step.after", action="exception", step=3, rank=1)
    load(fault, rank=1)
    faults.point("step.before", step=3)
    faults.point("step.after", step=2)
    with pytest.raises(RuntimeError, match=r"injected at step\.after"):
        faults.point("step.after", step=3)
    faults.point("step.after", step=3)
    for rank, attempt in ((0, 0), (1, 1)):
        load(fault, rank=rank, attempt=attempt)
        faults.point("step.after", step=3)


def test_a_point_without_a_step_lies_in_the_last_step():
    load(Fault(point="message", action="skip", step=3, purpose="gradients"))
    faults.point("step.before", step=2)
    assert faults.point("message", purpose="gradients") == ""
    faults.point("step.before", step=3)
    assert faults.point("message", purpose="loss") == ""
    assert faults.point("message", purpose="gradients") == "skip"


def test_an_error_of_the_system_is_raised_by_its_name():
    load(Fault(point="save.begin", action="error", value="ENOSPC"))
    with pytest.raises(OSError, match="No space left"):
        faults.point("save.begin")


@pytest.mark.parametrize("action", ["sleep", "loop", "gil"])
def test_a_rank_can_be_kept_busy(action: str):
    load(Fault(point="step.before", action=action, value=0.05))
    start = time.monotonic()
    faults.point("step.before", step=0)
    assert time.monotonic() - start >= 0.05


def test_one_bit_flips_in_place_and_no_other():
    weights = torch.arange(6, dtype=torch.float32)
    load(Fault(point="step.before", action="flip", tensor="head", element=4, bit=30))
    faults.point("step.before", step=0, tensors=lambda: {"weight:head": weights})
    changed = weights.view(torch.int32) ^ torch.arange(6, dtype=torch.float32).view(torch.int32)
    assert changed.tolist() == [0, 0, 0, 0, 1 << 30, 0]
