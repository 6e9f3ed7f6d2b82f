"""Blocks that torch.compile has fused take the same update and send the same messages."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from phalanx.core.layout import Layout
from phalanx.cost.traffic import transfers
from phalanx.train.mesh import build_mesh
from phalanx.train.step import build_engine, forward_backward
from phalanx.verify.oracle import compare, default_case, reference_job
from phalanx.verify.pool import RankPool


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["dp=2 zero=3 recompute=full compile=on", "tp=2 compile=on"])
def test_fused_blocks_send_what_is_predicted(ranks: RankPool, line: str) -> None:
    case = default_case(Layout.parse(line), {"recipe": {"dropout": 0.1 if "dp" in line else 0.0}})
    case = replace(case, steps=2)
    (references,) = ranks.run(1, reference_job, case)
    outcome = compare(ranks, case, references)
    assert outcome.complaints == []
    for rank, sent in enumerate(outcome.traffic):
        assert sent == transfers(case.run, case.run.layout.coordinates(rank))


def test_all_blocks_share_one_graph() -> None:
    case = default_case(Layout.parse("compile=on"))
    engine = build_engine(case.run, build_mesh(case.run.layout, torch.device("cpu")))
    counters.clear()
    forward_backward(engine, 0, case.stream().batch(0, engine.positions()))
    assert counters["stats"]["unique_graphs"] == 1
