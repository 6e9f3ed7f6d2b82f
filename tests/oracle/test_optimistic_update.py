"""Weights that move before the global norm is known end where they would have moved after it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.core.run import Run
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Case, verify
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import forward_backward, train_step, update
from phalanx.trainer.parallel.mesh import build_mesh

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")
STEEP = {"recipe": {"init_std": 1.0, "clip": 20.0}}  # norms of some 60 and 5 on the two stages


def train(run: Run, steps: int, poisoned: int = -1) -> tuple[list[Tensor], int, list[bool]]:
    """A few steps: what this rank holds after them, how often it rolled an update back, skips.

    Args:
        run: what to train.
        steps: how many.
        poisoned: the step in which a gradient on the last rank is not a number.
    """
    engine = build_engine(run, build_mesh(run.layout, CPU))
    engine.recorder.keeps_spans = True
    stream, skipped = Case(run).stream(), []
    for step in range(steps):
        batch = stream.batch(step, engine.positions())
        if step == poisoned:
            loss = forward_backward(engine, step, batch)
            if engine.mesh.at.pp == run.layout.pp - 1:
                engine.units[-1].unit.grad[0] = math.nan
            skipped.append(update(engine, loss).skipped)
        else:
            skipped.append(train_step(engine, step, batch).skipped)
    state = [unit.unit.master for unit in engine.units]
    for unit in engine.units:
        state += engine.optimizer.moments(unit.unit).values()
    rolled_back = [span for span in engine.recorder.spans if span.label == "roll back"]
    return state, len(rolled_back), skipped


def alike(ranks: RankPool, spec: CaseSpec, **how: Any) -> tuple[list[int], list[list[bool]]]:
    """Require the bits of a synchronous update; how often each rank rolled back, and its skips."""
    run = spec.case().run
    late = replace(run, layout=replace(run.layout, optimistic=True))
    ours = ranks.run(run.layout.ranks, train, late, *how.values())
    theirs = ranks.run(run.layout.ranks, train, run, *how.values())
    for (mine, _, skips), (true, never, true_skips) in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, true, strict=True))
        assert (skips, never) == (true_skips, 0)
    return [taken for _, taken, _ in ours], [skips for _, _, skips in ours]


@pytest.mark.parametrize("features", [("no-clip",), ("no-clip", "sgd")])
def test_nothing_is_rolled_back_where_nothing_is_clipped(
    ranks: RankPool, features: tuple[str, ...]
) -> None:
    spec = CaseSpec("pp=2 schedule=zb-h1 precision=fp32", features)
    assert alike(ranks, spec, steps=3)[0] == [0, 0]


@pytest.mark.parametrize(
    "layout", ["pp=2 schedule=zb-h1 precision=fp32", "dp=2 pp=2 schedule=zb-v zero=3"]
)
def test_huge_gradients_on_one_stage_are_rolled_back_on_the_other(
    ranks: RankPool, layout: str
) -> None:
    """The first stage's share exceeds the limit, so it waits; the last is optimistic in vain."""
    spec = CaseSpec(layout, tables=STEEP)
    rolled_back, _ = alike(ranks, spec, steps=3)
    assert sum(rolled_back) > 0
    assert 0 in rolled_back


def test_a_gradient_that_is_no_number_on_one_stage_is_skipped_on_all(ranks: RankPool) -> None:
    spec = CaseSpec("pp=2 schedule=zb-h1 precision=fp32", ("no-clip",))
    rolled_back, skips = alike(ranks, spec, steps=3, poisoned=1)
    assert rolled_back == [1, 0]  # the stage that has it knows at once
    assert skips == [[False, True, False]] * 2


def test_an_optimistic_first_step_that_is_skipped_leaves_no_moments(ranks: RankPool) -> None:
    spec = CaseSpec("pp=2 schedule=zb-h2 precision=bf16", ("no-clip",))
    assert alike(ranks, spec, steps=2, poisoned=0)[0] == [1, 0]


@pytest.mark.parametrize("layout", ["dp=2 pp=2 zero=2 schedule=zb-h1", "pp=2 schedule=dualpipe"])
def test_an_optimistic_layout_takes_the_steps_of_one_device(ranks: RankPool, layout: str) -> None:
    assert verify(ranks, CaseSpec(f"{layout} optimistic=on", ("tied",)).case()).complaints == []
