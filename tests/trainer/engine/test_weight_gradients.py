"""Gradients of weights, at once and later."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.core.run import Run
from phalanx.core.schedule import Kind
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Case
from phalanx.trainer.engine.batching import count_valid, micro_batches
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import forward_backward
from phalanx.trainer.parallel.mesh import build_mesh

CPU = torch.device("cpu")


def gradients(run: Run) -> dict[str, Tensor]:
    """What this rank has of every unit's gradient after the passes of one step."""
    engine = build_engine(run, build_mesh(run.layout, CPU))
    forward_backward(engine, 0, Case(run).stream().batch(0, engine.positions()))
    return {unit.unit.name: unit.unit.grad for unit in engine.units}


def split_and_whole(ranks: RankPool, layout: str, *features: str) -> None:
    """Compare zb-h1, whose weight gradients come in the order of 1F1B, with 1F1B itself."""
    run = CaseSpec(f"{layout} precision=fp32", features).case().run
    whole = ranks.run(run.layout.ranks, gradients, run)
    halves = replace(run, layout=replace(run.layout, schedule="zb-h1"))
    for ours, theirs in zip(ranks.run(run.layout.ranks, gradients, halves), whole, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["pp=2", "pp=2 tp=2 recompute=full", "dp=2 pp=2 zero=3"])
def test_a_split_backward_finds_the_same_bits_as_a_whole_one(ranks: RankPool, layout: str) -> None:
    split_and_whole(ranks, layout, "gpt")


def stopped_before_w(run: Run) -> tuple[Engine, list[str]]:
    """An engine that has done one F and one I, and which parameters W has work for."""
    engine = build_engine(run, build_mesh(run.layout, CPU))
    batches = micro_batches(engine, 0, Case(run).stream().batch(0, engine.positions()))
    scale, executor = 1 / count_valid(engine, batches), engine.executor
    for action in executor.row[: [a.kind for a in executor.row].index(Kind.INPUT_GRAD) + 1]:
        executor._do(action, batches, scale.expand(len(batches)))
    names = {
        id(parameter): slot.declaration.name
        for unit in engine.units
        for slot, parameter in zip(unit.unit.slots, unit.unit.parameters, strict=True)
    }
    deferred = executor._deferred[0, 0]
    return engine, [names[id(weight)] for work in deferred for weight in work.weights]


@pytest.mark.parametrize("features", [(), ("gpt",), ("tied",)])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_an_input_gradient_computes_no_weight_gradient(
    features: tuple[str, ...], recompute: str
) -> None:
    layout = f"dp=1 mb=4 schedule=zb-h1 recompute={recompute}"
    engine, left = stopped_before_w(CaseSpec(layout, features).case().run)
    assert all(not unit._filled and not unit.unit.grad.any() for unit in engine.units)
    every = [slot.declaration.name for unit in engine.units for slot in unit.unit.slots]
    assert sorted(set(left)) == sorted(every)
    assert len(left) == len(every) + ("tied" in features)  # a tied table is used twice
