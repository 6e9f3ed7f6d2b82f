"""What each recipe rounds, by which scale, and what it leaves alone."""

import pytest
import torch
from torch import Tensor

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.precision import SCALED, Precision
from phalanx.cost.refusals import refuse
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.verify import default_case
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.precision.arithmetic import choose
from phalanx.trainer.precision.blocks import Blocks
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.precision.formats import E4M3, E5M2
from phalanx.trainer.precision.history import LENGTH, AmaxHistory
from phalanx.trainer.precision.multiply import emulated, native
from phalanx.trainer.precision.nvfp4 import Nvfp4
from phalanx.trainer.precision.per_tensor import Current, PerTensor, quantized
from phalanx.trainer.precision.product import PLAIN, Multiplier, Operand

CPU = torch.device("cpu")
HERE = (Current(), Current(), Current())
BF16 = torch.bfloat16


def made(recipe: str, rest: torch.dtype) -> Multiplier:
    return {
        "fp8-current": PerTensor(*HERE, emulated(rest)),
        "fp8-block": Blocks(128, True, torch.float32, rest),
        "mxfp8": Blocks(32, False, torch.float8_e8m0fnu, rest),
        "nvfp4": Nvfp4((), (), (), rest),
    }[recipe]


def three_products(product: Multiplier, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    kept, matrix, grad = product.input(x), product.weight(w), product.gradient(g)
    again = product.weight(w, matrix.scale)
    return (
        product.forward(kept, matrix),
        product.input_gradient(grad.for_input, again),
        product.weight_gradient(grad.for_weight, kept),
    )


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [
        ("fp8-current", 0.01, 0.08),
        ("fp8-block", 0.01, 0.05),
        ("mxfp8", 0.01, 0.05),
        ("nvfp4", 0.05, 0.2),
    ],
)
@pytest.mark.parametrize("rest", [BF16, torch.float32, torch.float64])
def test_three_products_are_near_the_true_ones_and_not_equal(
    recipe: str, least: float, most: float, rest: torch.dtype
):
    torch.manual_seed(0)
    x, w, g = torch.randn(48, 2, 160), torch.randn(96, 160), torch.randn(96, 96)
    x, w, g = x.to(rest), w.to(rest), g.to(rest)
    got = three_products(made(recipe, rest), x, w, g)
    true = three_products(PLAIN, x.double(), w.double(), g.double())
    for mine, exact in zip(got, true, strict=True):
        assert mine.dtype == rest
        assert mine.shape == exact.shape
        assert least < (mine.double() - exact).norm() / exact.norm() < most


def test_an_outlier_spoils_its_own_stretch_and_no_other():
    x = torch.rand(4, 256) + 0.5
    x[0, 0] = 1e8
    w = torch.eye(256)
    spoiled = made("fp8-current", torch.float32), made("fp8-block", torch.float32)
    whole, stretch = (p.forward(p.input(x), p.weight(w)) for p in spoiled)
    assert (whole[1:] == 0).all()
    assert (stretch[0, :128] == 0).sum() == 127
    assert torch.allclose(stretch[:, 128:], x[:, 128:], rtol=0.07)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_of_torch_multiplies_as_the_emulation_does(transposed: bool):
    torch.manual_seed(1)
    a, b = torch.randn(32, 64), torch.randn(64, 48).t() if transposed else torch.randn(48, 64)
    left = quantized(a, Current()(a, E5M2), E5M2)
    right = quantized(b, Current()(b, E4M3), E4M3)
    mine, theirs = emulated(BF16)(left, right), native(BF16)(left, right)
    assert torch.allclose(mine.float(), theirs.float(), rtol=2**-7, atol=1e-2)


def test_sizes_that_the_kernel_does_not_take_are_emulated():
    x, w = torch.randn(5, 30), torch.randn(7, 30)
    left, right = (quantized(t, Current()(t, E4M3), E4M3) for t in (x, w))
    assert torch.equal(native(BF16)(left, right), emulated(BF16)(left, right))


def test_delayed_scales_are_those_of_the_past_and_the_first_step_only_takes_notes():
    history = AmaxHistory([], CPU)
    scaling, _, _ = history.of("up")
    assert scaling(torch.tensor([3.0, -7.0]), E4M3) is None
    history.finish_step()
    history.begin_step()
    assert scaling(torch.tensor([100.0]), E4M3) == 7.0 / 448.0
    history.finish_step()
    assert scaling(torch.tensor([1.0]), E4M3) == 100.0 / 448.0


def test_a_large_value_is_forgotten_after_1024_steps():
    history = AmaxHistory([], CPU)
    scaling, _, _ = history.of("up")
    for step in range(LENGTH + 1):
        history.begin_step()
        scaling(torch.tensor([9.0 if step == 0 else 1.0]), E4M3)
        history.finish_step()
        largest = history.largest(0)
        assert largest == (9.0 if step < LENGTH else 1.0)


def test_what_validation_and_overflows_leave_is_forgotten():
    history = AmaxHistory([], CPU)
    scaling, _, _ = history.of("up")
    scaling(torch.tensor([50.0]), E4M3)  # of validation
    history.begin_step()
    scaling(torch.tensor([2.0]), E4M3)
    history.finish_step()
    history.begin_step()
    scaling(torch.tensor([torch.inf]), E4M3)
    history.finish_step()
    assert history.largest(0) == 2.0


def test_a_recipe_changes_the_products_of_blocks_and_nothing_else():
    losses = {}
    for precision in ("fp64", *(f"{recipe}+fp64" for recipe in SCALED)):
        case = default_case(Layout.parse(f"precision={precision} mb=8"))
        engine = build_engine(case.run, build_mesh(case.run.layout, CPU))
        losses[precision] = [
            train_step(engine, step, case.stream().batch(step, engine.positions())).loss
            for step in range(2)
        ]
    plain = losses.pop("fp64")
    assert losses["fp8+fp64"][0] == plain[0]  # calibrates
    last = [values[1] for values in losses.values()]
    assert len(set(last)) == len(SCALED)
    assert all(1e-7 < abs(loss / plain[1] - 1) < 0.05 for loss in last)


def test_the_choice_is_told():
    mesh = build_mesh(Layout(), CPU)
    assert choose(Dtypes.named("bf16", CPU), mesh).description == ""
    told = choose(Dtypes.named("fp8-block+fp32", CPU), mesh).description
    assert told == "FP8, a scale for each 1 x 128 or 128 x 128, emulated exactly; fp32 elsewhere"


def test_inputs_are_kept_in_a_byte_each():
    x = torch.randn(4, 2, 256, dtype=BF16)
    sizes = {
        recipe: [part.nbytes for part in made(recipe, BF16).input(x) if part is not None]
        for recipe in ("fp8-current", "fp8-block", "mxfp8", "nvfp4")
    }
    assert sizes["fp8-current"] == [x.numel(), 4]
    assert sizes["fp8-block"] == [x.numel(), x.numel() // 128 * 4]
    assert sizes["mxfp8"] == [x.numel(), x.numel() // 32]
    assert sizes["nvfp4"] == [x.nbytes, 4]


@pytest.mark.parametrize(
    ("line", "features", "words"),
    [
        ("tp=2 precision=fp8", ("odd",), "recipe.seq=34, or sp=off"),
        ("tp=2 precision=fp8-block", (), "make it a multiple of 256"),
        ("tp=2 precision=mxfp8", (), "32 channels of keys"),
        ("precision=fp8 compile=on", (), "compile=off"),
        ("precision=fp16 logits=16", (), "use logits=0, or precision=bf16"),
        ("tp=2 precision=fp8", ("mqa",), "use tp up to 1"),
    ],
)
def test_what_would_scale_otherwise_is_refused_with_what_works(
    line: str, features: tuple[str, ...], words: str
):
    with pytest.raises(RefusedError, match=words):
        refuse(CaseSpec(line, features).case().run)


def test_a_precision_is_a_recipe_and_the_rest():
    parsed = [Precision.parse(word) for word in ("fp8", "mxfp8+fp64", "auto")]
    assert [(p.recipe, p.rest) for p in parsed] == [
        ("fp8", "bf16"),
        ("mxfp8", "fp64"),
        ("", "auto"),
    ]
    assert [Precision.parse(p).matrix_format for p in ("fp8-block", "nvfp4", "bf16")] == [
        "fp8",
        "fp4",
        "bf16",
    ]
    assert [str(Precision.parse(p).reference) for p in ("fp8", "bf16")] == ["fp8+fp64", "fp64"]


@pytest.mark.parametrize("word", ["fp8+fp16", "bf16+fp64", "fp7", "fp8+", "+fp64"])
def test_a_precision_that_does_not_exist_is_refused_with_those_that_do(word: str):
    with pytest.raises(UsageError, match="mxfp8"):
        Precision.parse(word)


def test_an_operand_without_a_scale_is_the_tensor():
    a, b = torch.randn(4, 8), torch.randn(6, 8)
    assert torch.equal(emulated(torch.float32)(Operand(a), Operand(b)), a @ b.t())
