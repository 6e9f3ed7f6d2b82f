"""In 16 bits, too, the oracle blames no honest layout, and finds what is broken on purpose."""

import pytest
import torch

from phalanx.oracle import mutations
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.mutations import Mutation, mutations_of
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Tamper, compare, reference_job, verify
from phalanx.trainer.engine.engine import Engine

pytestmark = pytest.mark.ranks

WIDE = {"model": {"hidden": 256, "ffn": 128}, "recipe": {"seq": 64}}


@pytest.mark.parametrize("line", ["dp=2 ep=2", "dp=1"])
@pytest.mark.parametrize(
    ("precision", "features"), [("bf16", ()), ("fp16", ()), ("bf16", ("stochastic",))], ids=str
)
def test_experts_in_16_bits_take_the_step_of_one_device(
    ranks: RankPool, line: str, precision: str, features: tuple[str, ...]
) -> None:
    case = CaseSpec(f"{line} mb=2 precision={precision}", ("experts", *features)).case(steps=2)
    assert verify(ranks, case).complaints == []


def test_a_wide_model_in_16_bits_takes_the_step_of_one_device(ranks: RankPool) -> None:
    case = CaseSpec("mb=4 precision=bf16", tables=WIDE).case(steps=1)
    assert verify(ranks, case).complaints == []


def test_both_sides_that_overflow_are_equal(ranks: RankPool) -> None:
    case = CaseSpec("dp=2 precision=fp16", tables={"recipe": {"init_std": 1.0}}).case()
    outcome = verify(ranks, case)
    assert outcome.complaints == []
    assert (outcome.errors["grad_norm"], outcome.errors["weight"]) == (0.0, 0.0)


def forgets_to_unscale(engine: Engine) -> Engine:
    """Gradients stay as large as the loss scale made them."""
    engine.loss_scale.unscale = lambda gradients: None  # type: ignore[method-assign]
    return engine


def overflows(engine: Engine) -> Engine:
    """A loss scale that no fp16 gradient bears."""
    engine.loss_scale.value = 2.0**40
    return engine


def prefers_later_experts(engine: Engine) -> Engine:
    """Every router chooses by scores that are not its own."""
    for router in engine.balancer.routers:
        router.bias += torch.linspace(0.0, 0.3, len(router.bias), dtype=torch.float64)
    return engine


SMALL = {"model": {"layers": 2}, "recipe": {"seq": 16}}

DENSE = [
    CaseSpec("tp=2 mb=8 precision=bf16", ("odd", "qk-norm"), tables=SMALL),
    CaseSpec("dp=2 zero=3 mb=4 precision=fp16", ("tied",), tables=SMALL),
    CaseSpec("pp=2 mb=4 precision=bf16", ("tied",), tables=SMALL),
    CaseSpec("cp=2 zero=2 mb=8 precision=bf16", tables=SMALL),
]


@pytest.mark.parametrize("spec", DENSE, ids=lambda spec: spec.layout)
def test_no_broken_message_escapes_in_16_bits(ranks: RankPool, spec: CaseSpec) -> None:
    case = spec.case(steps=1)
    (reference,) = ranks.run(1, reference_job, case)
    honest = compare(ranks, case, reference)
    assert honest.complaints == []
    broken = mutations_of(transfer for rank in honest.traffic for transfer in rank)
    assert len(broken) > 6
    escaped = [str(m) for m in broken if compare(ranks, case, reference, m).passed]
    assert escaped == []


@pytest.mark.parametrize(
    "mutation",
    [
        Mutation("all_to_all", "tokens", "swapped"),
        Mutation("all_to_all", "result gradients", "lost"),
        Mutation("all_reduce", "expert loads", "lost"),
        Mutation("reduce_scatter", "gradients", "doubled"),
    ],
    ids=str,
)
def test_a_broken_message_of_experts_is_found_in_16_bits(
    ranks: RankPool, mutation: Mutation
) -> None:
    balanced = {**SMALL, "recipe": {"seq": 16, "balance_speed": 0.05}}
    spec = CaseSpec("dp=2 ep=2 mb=4 precision=bf16", ("experts",), tables=balanced)
    assert not verify(ranks, spec.case(steps=1), mutation).passed


@pytest.mark.parametrize(
    ("tamper", "spec"),
    [
        (mutations.divides_by_micro_batches, CaseSpec("mb=4 precision=bf16", tables=SMALL)),
        (mutations.skips_a_block, CaseSpec("mb=8 precision=bf16")),
        (mutations.starts_one_step_late, CaseSpec("mb=8 precision=bf16", ("sgd",), tables=SMALL)),
        (mutations.swaps_chunks, CaseSpec("cp=2 mb=8 precision=fp16", tables=SMALL)),
        (forgets_to_unscale, CaseSpec("dp=2 mb=4 precision=fp16", tables=SMALL)),
        (overflows, CaseSpec("dp=2 mb=4 precision=fp16", tables=SMALL)),
        (prefers_later_experts, CaseSpec("mb=8 precision=bf16", ("experts",), tables=SMALL)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_step_is_found_in_16_bits(ranks: RankPool, tamper: Tamper, spec: CaseSpec) -> None:
    assert not verify(ranks, spec.case(steps=1), tamper=tamper).passed


def test_where_rounding_alone_decides_what_is_learned_nothing_passes(ranks: RankPool) -> None:
    case = CaseSpec("mb=4 precision=bf16", tables={"recipe": {"learning_rate": 3.0}}).case()
    (complaint, *_) = verify(ranks, case).complaints
    assert "rounding alone moves the gradient" in complaint
    assert "--steps 1" in complaint


def test_a_moment_that_rounds_to_its_neighbour_is_no_fault_and_a_late_start_is(
    ranks: RankPool,
) -> None:
    """In 16 bits it moves a weight by far more than the rest of fp32 does, and seldom."""
    spec = CaseSpec(
        "zero=3 recompute=operators offload=optimizer precision=fp32",
        ("mha", "odd", "qk-norm", "qkv-bias", "bf16-moments"),
        masked="none",
        tables={
            "model": {"layers": 2, "heads": 4, "kv_heads": 4, "hidden": 48},
            "recipe": {"batch": 1, "seed": 11},
        },
    )
    assert verify(ranks, spec.case()).complaints == []
    assert not verify(ranks, spec.case(steps=2), tamper=mutations.starts_one_step_late).passed


def test_what_a_moment_at_its_neighbour_does_to_the_next_gradient_is_no_fault(
    ranks: RankPool,
) -> None:
    spec = CaseSpec(
        "dp=2 tp=4 schedule=zb-h2 recompute=core+activation logits=1024 precision=fp32 sp=off",
        ("tied", "odd", "gpt", "qk-norm", "bf16-moments", "no-clip"),
        masked="uneven",
        tables={
            "model": {"layers": 2, "heads": 4, "kv_heads": 1, "hidden": 48},
            "recipe": {"batch": 2, "seed": 524},
        },
    )
    assert verify(ranks, spec.case()).complaints == []
