"""What rounding explains is measured: every result moves by a unit in its last place."""

import pytest
import torch

from phalanx.core.model import ModelShape
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.decisions import first_in_doubt, implausible_routes
from phalanx.oracle.reference import Decisions, ReferenceStep
from phalanx.oracle.rounding import DRAWS, Noise
from phalanx.oracle.verify import reference_job

SHAPE = ModelShape(experts=4, top_k=1, moe_ffn=8)


def test_a_layout_in_fp64_is_allowed_the_same_whatever_the_model() -> None:
    limits = reference_job(CaseSpec("mb=8").case(steps=1)).limits[0]
    assert {limit.off for limit in limits.grads.values()} == {1e-10}


def test_a_larger_model_is_allowed_what_rounding_explains_of_it() -> None:
    few = {"recipe": {"batch": 2, "seq": 16}}
    deep = {**few, "model": {"hidden": 96, "layers": 8}}
    small, large = (
        reference_job(CaseSpec("mb=2 precision=bf16", tables=tables).case(steps=1)).limits[0]
        for tables in (few, deep)
    )
    name = "blocks.0.attention.q.weight"
    assert 0.01 < small.grads[name].off < large.grads[name].off < 0.5


def step_of(scores: torch.Tensor, grad_norm: float = 1.0) -> ReferenceStep:
    return ReferenceStep(1.0, grad_norm, {}, {}, {"router.bias": scores})


def complaints_about(chosen: int, margin: float) -> list[str]:
    """Of one token whose best expert is the first, and the second nearly as good."""
    scores = torch.tensor([[[0.50, 0.49, 0.3, 0.1]]])
    decisions = Decisions({(0, "router.bias"): torch.tensor([[[chosen]]])}, (False,))
    noise = Noise(0.0, 0.0, {}, {}, {"router.bias": margin})
    return implausible_routes(SHAPE, [step_of(scores)], [noise], decisions)


def test_a_token_between_two_experts_may_go_to_either() -> None:
    assert complaints_about(chosen=0, margin=0.0) == []
    assert complaints_about(chosen=1, margin=0.003) == []


def test_a_token_that_goes_to_a_worse_expert_than_rounding_explains_is_told() -> None:
    (complaint,) = complaints_about(chosen=2, margin=0.003)
    assert complaint.startswith("step 1: router sends 1 of 1 tokens to experts that are not the")
    assert complaints_about(chosen=1, margin=0.001) != []


@pytest.mark.parametrize(
    ("norm", "skipped", "overflows", "expected"),
    [
        (1.0, False, 0, (1, [])),
        (torch.inf, True, DRAWS, (1, [])),
        (1.0, True, 1, (0, [])),  # rounding decides: what follows is not compared
        (torch.inf, False, DRAWS - 1, (0, [])),
        (1.0, True, 0, (0, ["step 1: was skipped, and on one device it does not overflow"])),
        (torch.inf, False, DRAWS, (0, ["step 1: moved, and on one device it overflows"])),
    ],
)
def test_a_skip_that_no_draw_shares_is_told(
    norm: float, skipped: bool, overflows: int, expected: tuple[int, list[str]]
) -> None:
    noise = Noise(0.0, 0.0, {}, {}, {}, overflows)
    step = step_of(torch.zeros(1, 1, 4), norm)
    assert first_in_doubt([step], [noise], Decisions({}, (skipped,))) == expected
