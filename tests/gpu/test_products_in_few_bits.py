"""On a GPU with 8-bit matrix units their kernels multiply what the emulation multiplies.

Where there is none these tests are skipped, and pytest counts them.
"""

import pytest
import torch

from phalanx.oracle.cases import CaseSpec
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.precision.arithmetic import choose
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.precision.formats import E4M3, E5M2, Format
from phalanx.trainer.precision.multiply import emulated, has_native_products, native
from phalanx.trainer.precision.per_tensor import Current, quantized

pytestmark = [
    pytest.mark.skipif(
        not (torch.cuda.is_available() and has_native_products(torch.device("cuda"))),
        reason="needs a GPU of capability 8.9",
    ),
    pytest.mark.filterwarnings("ignore"),  # what drivers say of themselves
]

LARGER = {"model": {"hidden": 256, "ffn": 512}}


@pytest.mark.parametrize("of_left", [E4M3, E5M2], ids=["forward", "gradient"])
@pytest.mark.parametrize("rest", [torch.bfloat16, torch.float32])
def test_the_kernels_multiply_as_the_emulation_does(of_left: Format, rest: torch.dtype):
    torch.manual_seed(0)
    a, b = (torch.randn(n, 512, device="cuda", dtype=rest) for n in (256, 384))
    left = quantized(a, Current()(a, of_left), of_left)
    right = quantized(b, Current()(b, E4M3), E4M3)
    mine, theirs = native(rest)(left, right), emulated(rest)(left, right)
    assert (mine.double() - theirs.double()).norm() < 5e-3 * theirs.double().norm()


@pytest.mark.parametrize("recipe", ["fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_steps_in_few_bits_are_near_those_of_bf16(recipe: str):
    losses = {}
    for precision in ("bf16", recipe):
        case = CaseSpec(f"precision={precision} mb=8", tables=LARGER).case()
        engine = build_engine(case.run, build_mesh(case.run.layout, torch.device("cuda")))
        stream = case.stream()
        losses[precision] = [
            train_step(engine, i, stream.batch(i, engine.positions())).loss
            for i in range(case.steps)
        ]
    assert losses[recipe] == pytest.approx(losses["bf16"], rel=0.02)


def test_the_kernels_are_chosen_and_told():
    case = CaseSpec("precision=fp8").case()
    device = torch.device("cuda")
    mesh = build_mesh(case.run.layout, device)
    told = choose(Dtypes.named("fp8", device), mesh).description
    assert told == "FP8, delayed scaling, by torch._scaled_mm; bf16 elsewhere"
