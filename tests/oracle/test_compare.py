import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.oracle.compare import TOLERANCES, Deviation, Seen, judge
from phalanx.oracle.reference import ReferenceStep

FP64 = TOLERANCES["fp64"]


def reference(**tensors: Tensor) -> ReferenceStep:
    """One step whose gradients and weights are the same tensors."""
    norm = math.sqrt(sum(x.square().sum().item() for x in tensors.values()))
    return ReferenceStep(1.0, norm, tensors, tensors)


def seen(name: str, difference: Tensor, start: int = 0, digest: str = "a") -> Seen:
    """A stretch that differs from the reference by this much."""
    stop = start + difference.numel()
    return Seen(
        step=0,
        field="weight",
        name=name,
        place=((0,), (4,), start, stop),
        squares=difference.square().sum().item(),
        largest=difference.abs().max().item(),
        size=difference.numel(),
        digest=digest,
    )


def verdict(step: ReferenceStep, items: list[Seen], field: str = "weight") -> Deviation:
    return judge([item._replace(field=field) for item in items], [step], field, FP64)


ONES = torch.ones(4, dtype=torch.float64)
NONE = torch.zeros(4, dtype=torch.float64)


def test_equal_tensors_pass() -> None:
    assert verdict(reference(w=ONES), [seen("w", NONE)]) == (0.0, [])


@given(st.floats(1e-15, 1.0))
def test_what_is_further_off_than_the_tolerance_is_named_and_nothing_else(by: float) -> None:
    found = verdict(reference(w=ONES), [seen("w", ONES * by)])
    assert found.worst == pytest.approx(by)
    if by > 1.001 * FP64.weight:
        (complaint,) = found.complaints
        assert complaint.startswith("step 1: weight of w is off by")
    elif by < 0.999 * FP64.weight:
        assert found.complaints == []


def test_the_worst_of_several_copies_counts() -> None:
    copies = [seen("w", NONE), seen("w", ONES)]
    assert verdict(reference(w=ONES), copies, "grad").complaints == [
        "step 1: grad of w is off by 1.0e+00 of its norm"
    ]


def test_a_stretch_that_no_rank_holds_is_missed() -> None:
    found = verdict(reference(w=ONES), [seen("w", NONE[:3])])
    assert found.complaints == ["step 1: weight of w covers 3 of 4 elements"]


def test_a_tensor_that_no_rank_holds_is_missed() -> None:
    found = verdict(reference(w=ONES, v=ONES), [seen("w", NONE)])
    assert found.complaints == ["step 1: weight of v covers 0 of 4 elements"]


def test_copies_of_a_weight_must_be_equal_bit_for_bit() -> None:
    copies = [seen("w", NONE), seen("w", NONE, digest="b")]
    assert verdict(reference(w=ONES), copies).complaints == [
        "step 1: weight of w differs between ranks that hold copies of it"
    ]


@pytest.mark.parametrize("order", [0, 1])
def test_one_copy_that_is_not_finite_is_enough(order: int) -> None:
    broken = seen("w", NONE)._replace(squares=math.inf, largest=math.inf)
    copies = [seen("w", NONE), broken]
    found = verdict(reference(w=ONES), copies if order else copies[::-1], "grad")
    assert found.complaints == ["step 1: grad of w is not finite"]


def test_one_wrong_element_of_many_is_found() -> None:
    many = torch.ones(10**6, dtype=torch.float64)
    wrong = torch.zeros_like(many)
    wrong[7] = 5e-8  # the norm of it is far below the tolerance of the norm of all
    assert wrong.norm() < FP64.weight * many.norm()
    found = verdict(reference(w=many), [seen("w", wrong)])
    assert found.complaints == ["step 1: weight of w has an element off by 5.0e-08 of its largest"]


def test_a_gradient_that_is_all_rounding_is_not_compared_digit_by_digit() -> None:
    noise = torch.full((4,), 1e-18, dtype=torch.float64)
    step = reference(w=ONES, k=noise)
    assert verdict(step, [seen("w", NONE), seen("k", 2 * noise)], "grad").complaints == []
    assert verdict(step, [seen("w", NONE), seen("k", 1e-9 * ONES)], "grad").complaints != []


def test_weights_may_drift_where_the_gradient_is_all_rounding_but_all_copies_alike() -> None:
    noise = torch.full((4,), 1e-18, dtype=torch.float64)
    step = ReferenceStep(1.0, 2.0, {"k": noise}, {"k": ONES})
    assert judge([seen("k", 1e-6 * ONES)], [step], "weight", FP64).complaints == []
    copies = [seen("k", NONE), seen("k", NONE, digest="b")]
    assert judge(copies, [step], "weight", FP64).complaints != []
    broken = [seen("k", NONE)._replace(squares=math.inf)]
    assert judge(broken, [step], "weight", FP64).complaints != []


def test_a_bias_is_measured_by_the_weights_around_it() -> None:
    tiny = 1e-6 * ONES
    step = ReferenceStep(1.0, 1.0, {"b": ONES, "w": ONES}, {"b": tiny, "w": ONES})
    items = [seen("w", NONE), seen("b", 1e-12 * ONES)]
    assert judge(items, [step], "weight", FP64).complaints == []
