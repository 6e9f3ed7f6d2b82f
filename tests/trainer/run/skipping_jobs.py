"""Runs in which some steps overflow, on rank processes, and everything that a rank then holds."""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.core.run import Run
from phalanx.oracle.verify import Case
from phalanx.trainer.checkpoint import Checkpoint, Saver
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import evaluate, forward_backward, train_step, update
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.state import own_pieces, progress, restore

CORPUS = "made up"
State = dict[str, dict[str, Tensor]]  # by kind, by name


def held(engine: Engine) -> State:
    """A copy of every byte that a rank carries from step to step, by kind."""
    kinds: State = {kind: {} for kind in ("weights", "master", "moments", "counters", "biases")}
    optimizer = engine.optimizer
    for sharded in engine.units:
        unit, name = sharded.unit, sharded.unit.name
        sharded.acquire()
        kinds["weights"][name] = unit.weights.clone()
        sharded.release()
        kinds["master"][name] = unit.master.clone()
        for field, moment in optimizer.moments(unit).items():
            kinds["moments"][f"{name}/{field}"] = moment.clone()
        torch_state = optimizer.of[sharded].torch
        for i, state in enumerate(torch_state.state.values() if torch_state else ()):
            if "step" in state:
                kinds["counters"][f"{name}/{i}"] = torch.as_tensor(state["step"]).clone()
    kinds["counters"]["updates"] = torch.tensor(optimizer.updates)
    kinds["counters"]["learning rate"] = torch.tensor(optimizer.learning_rate)
    for router in engine.balancer.routers:
        kinds["biases"][router.prefix] = router.bias.clone()
    history = engine.arithmetic.history
    kinds["history"] = {"values": history.values.clone(), "steps": torch.tensor(history.steps)}
    scale = engine.loss_scale
    kinds["loss scale"] = {"value": torch.tensor(scale.value), "clean": torch.tensor(scale.clean)}
    return kinds


def same(a: State, b: State) -> list[str]:
    """The kinds of state, by name, in which two ranks differ in any bit."""
    return [kind for kind in a if not _equal(a[kind], b[kind])]


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _take(engine: Engine, case: Case, step: int, *, overflows: bool) -> bool:
    """One step; whether it was skipped, as it is where a gradient of the last stage overflows."""
    loss = forward_backward(engine, step, case.stream().batch(step, engine.positions()))
    if overflows and engine.mesh.at.pp == engine.run.layout.pp - 1:
        for gradient in engine.units[-1].gradients():
            gradient.view(-1)[0] = math.inf
    return update(engine, loss).skipped


def built(run: Run) -> Engine:
    """The engine of this rank."""
    mesh = build_mesh(run.layout, torch.device("cpu"), kv_heads=run.model.kv_heads)
    return build_engine(run, mesh)


def around_a_skipped_step(run: Run, before: int) -> tuple[State, State]:
    """What this rank holds before and after a step that overflows, and that follows others.

    Args:
        run: what is trained.
        before: good steps before it.
    """
    engine, case = built(run), Case(run)
    for step in range(before):
        assert not _take(engine, case, step, overflows=False)
    was = held(engine)
    assert _take(engine, case, before, overflows=True)
    return was, held(engine)


def validation_loss(run: Run) -> float:
    """The loss of a batch that is not learned from, under the initial weights."""
    return _validate(built(run), Case(run))


def train_job(run: Run, steps: int, validates: bool) -> tuple[list[float], State]:
    """The losses of some steps, with or without a validation around each, and what is held then."""
    engine, case = built(run), Case(run)
    losses = []
    for step in range(steps):
        if validates:
            _validate(engine, case)
        losses.append(train_step(engine, step, case.stream().batch(step, engine.positions())).loss)
        if validates:
            _validate(engine, case)
    return losses, held(engine)


def _validate(engine: Engine, case: Case) -> float:
    run = engine.run
    executor = engine.forward_executor(run.micro_batches, run.layout.mb, engine.executor_seq)
    return evaluate(engine, executor, case.stream().batch(99, engine.positions()))


def run_job(
    run: Run,
    steps: tuple[int, int],
    overflows: Collection[int],
    folder: Path,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> State:
    """Take some steps, from a checkpoint in `folder` unless they are the first, and save there.

    Args:
        run: what is trained.
        steps: the first, and the one that is not taken any more.
        overflows: the steps that overflow.
        folder: of checkpoints.
        change: of what the checkpoint says that is not a tensor; then nothing is saved.
    """
    engine, case = built(run), Case(run)
    first, end = steps
    if first:
        with Checkpoint.open(folder / f"step-{first:08}") as checkpoint:
            if change is not None:
                change(checkpoint.state)
            assert restore(engine, checkpoint) == first
    skipped = [i for i in range(first, end) if _take(engine, case, i, overflows=i in overflows)]
    assert skipped == [i for i in range(first, end) if i in overflows]
    if change is not None:
        return held(engine)
    mesh = engine.mesh
    saver = Saver(folder, run.layout.rank_at(mesh.at), mesh.world.size, attempt=f"to_{end}")
    saver.save(end, own_pieces(engine), progress(engine, end, {"corpus": CORPUS}))
    saver.wait()
    return held(engine)
