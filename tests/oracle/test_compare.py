import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.oracle.compare import Judgment, Seen, judge, judge_numbers
from phalanx.oracle.limits import (
    ELEMENT,
    GRADIENT,
    TENSOR,
    WEIGHT,
    StepLimits,
    fixed_limits,
    measured_limits,
)
from phalanx.oracle.reference import ReferenceStep
from phalanx.oracle.rounding import Deviation, Noise


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


def verdict(step: ReferenceStep, items: list[Seen], field: str = "weight") -> Judgment:
    return judge([item._replace(field=field) for item in items], fixed_limits([step]), field)


ONES = torch.ones(4, dtype=torch.float64)
NONE = torch.zeros(4, dtype=torch.float64)


def test_equal_tensors_pass() -> None:
    assert verdict(reference(w=ONES), [seen("w", NONE)]) == (0.0, [], 0.0)


@given(st.floats(1e-15, 1.0))
def test_what_is_further_off_than_the_tolerance_is_named_and_nothing_else(by: float) -> None:
    found = verdict(reference(w=ONES), [seen("w", ONES * by)])
    assert found.worst == pytest.approx(by)
    if by > 1.001 * TENSOR:
        (complaint,) = found.complaints
        assert complaint.startswith("step 1: weight of w is off by")
    elif by < 0.999 * TENSOR:
        assert found.complaints == []


def test_the_worst_of_several_copies_counts() -> None:
    copies = [seen("w", NONE), seen("w", ONES)]
    assert verdict(reference(w=ONES), copies, "grad").complaints == [
        "step 1: grad of w is off by 1.0e+00 of its norm; rounding explains 1.0e-10"
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
    assert wrong.norm() < TENSOR * many.norm()
    found = verdict(reference(w=many), [seen("w", wrong)])
    assert wrong.max() > ELEMENT
    assert found.complaints == [
        "step 1: weight of w has an element off by 5.0e-08 of its largest; "
        "rounding explains 1.0e-08"
    ]


def test_a_gradient_that_is_all_rounding_is_not_compared_digit_by_digit() -> None:
    noise = torch.full((4,), 1e-18, dtype=torch.float64)
    step = reference(w=ONES, k=noise)
    assert verdict(step, [seen("w", NONE), seen("k", 2 * noise)], "grad").complaints == []
    assert verdict(step, [seen("w", NONE), seen("k", 1e-9 * ONES)], "grad").complaints != []


def test_weights_may_drift_where_the_gradient_is_all_rounding_but_all_copies_alike() -> None:
    noise = torch.full((4,), 1e-18, dtype=torch.float64)
    step = ReferenceStep(1.0, 2.0, {"k": noise}, {"k": ONES})
    assert judge([seen("k", 1e-6 * ONES)], fixed_limits([step]), "weight").complaints == []
    copies = [seen("k", NONE), seen("k", NONE, digest="b")]
    assert judge(copies, fixed_limits([step]), "weight").complaints != []
    broken = [seen("k", NONE)._replace(squares=math.inf)]
    assert judge(broken, fixed_limits([step]), "weight").complaints != []


def test_a_bias_is_measured_by_the_weights_around_it() -> None:
    tiny = 1e-6 * ONES
    step = ReferenceStep(1.0, 1.0, {"b": ONES, "w": ONES}, {"b": tiny, "w": ONES})
    items = [seen("w", NONE), seen("b", 1e-12 * ONES)]
    assert judge(items, fixed_limits([step]), "weight").complaints == []


def measured(step: ReferenceStep, norm: float, element: float) -> list[StepLimits]:
    """The limits of a step whose draws lay so far apart, in the gradient and weight of w."""
    deviation = {"w": Deviation(norm, element)}
    noise = Noise(1e-3, 1e-3, deviation, deviation, {})
    return measured_limits([step], [noise], torch.bfloat16, rate=0.0)


@pytest.mark.parametrize("field", ["grad", "weight"])
def test_in_low_precision_some_times_what_rounding_explains_is_allowed_and_more_is_not(
    field: str,
) -> None:
    many = torch.ones(10_000, dtype=torch.float64)
    limits = measured(reference(w=many), norm=2.0, element=0.02)

    def complaints(off: float) -> list[str]:
        return judge([seen("w", off * many)._replace(field=field)], limits, field).complaints

    factor, _ = GRADIENT if field == "grad" else WEIGHT
    assert complaints(0.019 * factor) == []
    (complaint,) = complaints(0.03 * factor)
    assert complaint.startswith(f"step 1: {field} of w is off by ")


def test_in_low_precision_one_wrong_element_is_found() -> None:
    many = torch.ones(10_000, dtype=torch.float64)
    limits = measured(reference(w=many), norm=2.0, element=0.02)
    wrong = torch.zeros_like(many)
    wrong[3] = 0.2
    (complaint,) = judge([seen("w", wrong)._replace(field="grad")], limits, "grad").complaints
    assert complaint.startswith("step 1: grad of w has an element off by 2.0e-01 of its largest")


def test_a_weight_whose_gradient_may_have_either_sign_may_move_both_ways() -> None:
    grads = {"w": torch.tensor([1.0, 1.0, 1.0, 1e-4], dtype=torch.float64)}
    step = ReferenceStep(1.0, 2.0, grads, {"w": ONES})
    noise = Noise(0.0, 0.0, {"w": Deviation(1e-3, 1e-3)}, {"w": Deviation(0, 0)}, {})
    flipped = torch.tensor([0.0, 0.0, 0.0, 0.1], dtype=torch.float64)
    for rate, allowed in ((0.05, True), (0.02, False)):
        limits = measured_limits([step], [noise], torch.bfloat16, rate)
        assert (judge([seen("w", flipped)], limits, "weight").complaints == []) == allowed


def test_a_loss_that_is_summed_in_fp32_may_round_where_no_draw_happened_to() -> None:
    noise = Noise(0.0, 0.0, {"w": Deviation(0, 0)}, {"w": Deviation(0, 0)}, {})
    (limit,) = measured_limits([reference(w=ONES)], [noise], torch.float32, rate=0.0)
    found = [judge_numbers([[1.0 + off]], [1.0], [limit.loss], "loss") for off in (2e-7, 1e-4)]
    assert [bool(verdict.complaints) for verdict in found] == [False, True]


def overflowing(**tensors: Tensor) -> ReferenceStep:
    """A step whose gradients are not finite, and whose weights are as they were."""
    broken = {name: torch.full_like(x, math.nan) for name, x in tensors.items()}
    return ReferenceStep(1.0, math.inf, broken, tensors)


def test_gradients_of_a_step_that_overflows_are_not_compared() -> None:
    wild = seen("w", NONE)._replace(field="grad", squares=math.inf, largest=math.inf)
    assert judge([wild], fixed_limits([overflowing(w=ONES)]), "grad").complaints == []


def test_a_weight_that_moves_in_a_step_that_overflows_is_found() -> None:
    limits = fixed_limits([reference(w=ONES), overflowing(w=ONES)])
    steps = [seen("w", 1e-13 * ONES), seen("w", 1e-13 * ONES)._replace(step=1)]
    assert judge(steps, limits, "weight").complaints == []
    moved = [steps[0], steps[1]._replace(digest="b")]
    assert judge(moved, limits, "weight").complaints == [
        "step 2: weight of w moved in a step that overflowed"
    ]
    first = fixed_limits([overflowing(w=ONES)])
    assert judge([seen("w", NONE)], first, "weight").complaints == []
    assert judge([seen("w", 1e-13 * ONES)], first, "weight").complaints != []


@pytest.mark.parametrize(
    ("mine", "true", "off"),
    [
        (math.inf, math.inf, 0.0),
        (math.nan, math.inf, 0.0),
        (1.0, math.inf, math.inf),
        (math.inf, 1.0, math.inf),
        (1.5, 1.0, 0.5),
    ],
)
def test_two_numbers_that_are_not_finite_are_equal_and_to_nothing_else(
    mine: float, true: float, off: float
) -> None:
    found = judge_numbers([[mine], [mine]], [true], [0.1], "grad_norm")
    assert found.worst == off
    assert found.complaints == ([f"step 1: grad_norm is off by {off:.1e}"] if off else [])


def test_ranks_that_say_different_numbers_are_told() -> None:
    found = judge_numbers([[1.0, 2.0], [1.0, 2.0 + 1e-14]], [1.0, 2.0], [0.1, 0.1], "loss")
    assert found.complaints == ["loss differs between ranks"]
