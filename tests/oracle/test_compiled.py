"""Blocks that torch.compile has fused take the same update and send the same messages."""

import pytest
import torch
from torch._dynamo.utils import counters

from phalanx.core.errors import RefusedError
from phalanx.core.layout import Layout
from phalanx.cost.messages import rank_messages
from phalanx.cost.refusals import refuse
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import compare, default_case, reference_job
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import forward_backward
from phalanx.trainer.parallel.mesh import build_mesh

# While it compiles, torch is warned of its own insides.
of_the_compiler = pytest.mark.filterwarnings("ignore")

SMALL = {"layers": 2, "hidden": 32, "ffn": 48}


@pytest.mark.ranks
def test_fused_blocks_send_what_is_predicted(ranks: RankPool) -> None:
    require_the_same(ranks, CaseSpec("tp=2 recompute=full compile=on", tables={"model": SMALL}))


# What a compiled block meets: each of these once, most of them with recomputation or a cut.
FEATURES = [
    CaseSpec("dp=2 zero=3 compile=on"),
    CaseSpec("tp=2 compile=on", ("latent",)),
    CaseSpec("dp=1 compile=on", ("qk-norm",)),
    CaseSpec("tp=2 recompute=full compile=on", ("deepseek",)),
    CaseSpec("dp=2 ep=2 zero=2 mb=2 compile=on", ("deepseek",)),
    CaseSpec("cp=2 tp=2 recompute=full compile=on", documents=True),
    CaseSpec("cp=2 context=ulysses compile=on", ("latent",)),
    CaseSpec("cp=2 recompute=selective compile=on", ("dropout",)),
    CaseSpec("pp=2 v=2 schedule=interleaved precision=bf16 compile=on", ("gpt", "tied")),
    CaseSpec("tp=2 precision=fp16 compile=on"),
]


@pytest.mark.ranks
@pytest.mark.sweep
@pytest.mark.parametrize("spec", FEATURES, ids=lambda q: f"{q.layout} {q.unusual}".strip())
def test_fused_blocks_of_every_kind_take_the_same_step(ranks: RankPool, spec: CaseSpec) -> None:
    require_the_same(ranks, spec)


def require_the_same(ranks: RankPool, spec: CaseSpec) -> None:
    """The update of one device, by the messages that are predicted."""
    case = spec.case(steps=2)
    (reference,) = ranks.run(1, reference_job, case)
    outcome = compare(ranks, case, reference)
    assert outcome.complaints == []
    for rank, sent in enumerate(outcome.traffic):
        assert sent == rank_messages(case.run, case.run.layout.coordinates(rank))


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe"])
def test_a_schedule_that_splits_backward_is_refused_with_what_works(schedule: str) -> None:
    case = CaseSpec(f"pp=2 schedule={schedule} compile=on").case()
    with pytest.raises(RefusedError, match=r"compile=off, or schedule=1f1b"):
        refuse(case.run)


@of_the_compiler
def test_all_blocks_share_one_graph() -> None:
    counters.clear()
    loss_of("compile=on", dropout=0.0)
    assert counters["stats"]["unique_graphs"] == 1


@of_the_compiler
def test_masks_of_dropout_are_those_of_blocks_that_are_not_fused() -> None:
    assert loss_of("compile=on", dropout=0.5) == pytest.approx(loss_of("", dropout=0.5), rel=1e-12)


def loss_of(line: str, dropout: float) -> float:
    """The loss of the first step on one rank."""
    case = default_case(Layout.parse(line), {"model": SMALL, "recipe": {"dropout": dropout}})
    engine = build_engine(case.run, build_mesh(case.run.layout, torch.device("cpu")))
    return forward_backward(engine, 0, case.stream().batch(0, engine.positions()))
