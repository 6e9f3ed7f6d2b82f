"""On a GPU a step is the same step: its kernels, its formats, its memory.

Where there is no GPU these tests are skipped, and pytest counts them.
"""

import pytest
import torch

from phalanx.core.layout import Layout
from phalanx.cost.memory import rank_memory
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.reference import reference_steps
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import StepResult, train_step
from phalanx.trainer.ops.kernels import grouped_outer, grouped_times
from phalanx.trainer.parallel.mesh import build_mesh

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # what the compiler and drivers say of themselves
]

LARGER = {"model": {"hidden": 256, "ffn": 512}}


def steps_on(device: str, spec: CaseSpec) -> list[StepResult]:
    case = spec.case()
    engine = build_engine(case.run, build_mesh(case.run.layout, torch.device(device)))
    stream = case.stream()
    return [train_step(engine, i, stream.batch(i, engine.positions())) for i in range(case.steps)]


@pytest.mark.parametrize(
    ("line", "features"),
    [
        ("precision=fp32", ()),
        ("precision=fp32 recompute=full", ("dropout", "tied")),
        ("precision=fp32 recompute=selective", ("gpt", "smoothing")),
        ("precision=fp32 compile=on", ()),
        ("precision=fp32", ("experts",)),
        ("precision=fp32", ("latent",)),
        ("precision=fp32", ("qk-norm",)),
    ],
)
def test_three_steps_are_those_of_plain_pytorch_on_the_cpu(line: str, features: tuple[str, ...]):
    spec = CaseSpec(line, features, tables=LARGER)
    references = reference_steps(spec.case().run, spec.case().stream(), 3)
    for ours, plain in zip(steps_on("cuda", spec), references, strict=True):
        assert ours.loss == pytest.approx(plain.loss, rel=1e-4)
        assert ours.grad_norm == pytest.approx(plain.grad_norm, rel=1e-3)


@pytest.mark.parametrize("features", [(), ("experts",), ("latent",)])
def test_bf16_is_near_fp32(features: tuple[str, ...]):
    wide = steps_on("cuda", CaseSpec("precision=fp32", features, tables=LARGER))
    narrow = steps_on("cuda", CaseSpec("precision=bf16", features, tables=LARGER))
    for a, b in zip(wide, narrow, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=5e-3)


@pytest.mark.parametrize("line", ["mb=4", "mb=4 recompute=full", "mb=4 recompute=selective"])
def test_memory_peaks_where_the_planner_says(line: str):
    layout = Layout.parse(f"{line} precision=bf16")
    size = {"hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816, "layers": 8, "vocab": 8192}
    case = CaseSpec(str(layout), tables={"model": size, "recipe": {"seq": 1024}}).case()
    torch.cuda.reset_peak_memory_stats()
    engine = build_engine(case.run, build_mesh(layout, torch.device("cuda")))
    for step in range(2):
        train_step(engine, step, case.stream().batch(step, engine.positions()))
    planned = rank_memory(case.run.model, layout, case.run.recipe.seq, 0, 1.0).allocated
    assert torch.cuda.max_memory_allocated() == pytest.approx(planned, rel=0.06)


@pytest.mark.parametrize("counts", [[24, 0, 8], [0, 0, 3], [5, 6, 7]])
@pytest.mark.parametrize("sizes", [(64, 40), (24, 20)])
def test_products_of_experts_in_one_kernel_are_those_of_each(
    counts: list[int], sizes: tuple[int, int]
) -> None:
    n_in, n_out = sizes
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), n_in, generator=generator).bfloat16()
    grads = torch.randn(sum(counts), n_out, generator=generator).bfloat16()
    weights = torch.randn(len(counts), n_out, n_in, generator=generator).bfloat16()
    here = grouped_times(rows.double(), weights.double(), counts)
    there = grouped_times(rows.cuda(), weights.cuda(), counts)
    torch.testing.assert_close(there.cpu().double(), here, rtol=2e-2, atol=2e-2)
    here = grouped_outer(grads.double(), rows.double(), counts)
    there = grouped_outer(grads.cuda(), rows.cuda(), counts)
    torch.testing.assert_close(there.cpu().double(), here, rtol=2e-2, atol=2e-2)
