"""What an engine leaves behind, and what a step needs of the batch."""

import gc
import weakref

import torch

from phalanx.core.layout import Layout
from phalanx.oracle.verify import default_case
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh


def test_an_engine_that_nobody_holds_is_freed() -> None:
    case = default_case(Layout.parse("dp=1 mb=2 recompute=full"))
    mesh = build_mesh(case.run.layout, torch.device("cpu"))
    engine = build_engine(case.run, mesh)
    train_step(engine, 0, case.stream().batch(0, engine.positions()))
    left = [weakref.ref(mesh.ledger), weakref.ref(engine.units[0]), weakref.ref(engine.optimizer)]
    del engine, mesh
    gc.collect()
    assert [ref() for ref in left] == [None, None, None]


def test_two_steps_lower_the_loss_of_one_batch() -> None:
    case = default_case(Layout.parse("dp=1 mb=4"))
    engine = build_engine(case.run, build_mesh(case.run.layout, torch.device("cpu")))
    batch = case.stream().batch(0, engine.positions())
    losses = [train_step(engine, step, batch).loss for step in range(3)]
    assert losses[2] < losses[1] < losses[0]
