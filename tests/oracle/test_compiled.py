"""Blocks that torch.compile has fused take the same update and send the same messages."""

import pytest
import torch
from torch._dynamo.utils import counters

from phalanx.core.layout import Layout
from phalanx.cost.traffic import transfers
from phalanx.train.mesh import build_mesh
from phalanx.train.step import build_engine, forward_backward
from phalanx.verify.oracle import compare, default_case, reference_job
from phalanx.verify.pool import RankPool

# While it compiles, torch is warned of its own insides.
of_the_compiler = pytest.mark.filterwarnings("ignore")

SMALL = {"layers": 2, "hidden": 32, "ffn": 48}


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["dp=2 zero=3 compile=on", "tp=2 recompute=full compile=on"])
def test_fused_blocks_send_what_is_predicted(ranks: RankPool, line: str) -> None:
    case = default_case(Layout.parse(line), {"model": SMALL}, steps=2)
    (references,) = ranks.run(1, reference_job, case)
    outcome = compare(ranks, case, references)
    assert outcome.complaints == []
    for rank, sent in enumerate(outcome.traffic):
        assert sent == transfers(case.run, case.run.layout.coordinates(rank))


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
