"""Measures the loss on held-out text between steps, and stops in between if it is asked to."""

import time
from functools import partial

import torch

from phalanx.trainer import faults
from phalanx.trainer.engine.step import LossSum, evaluate
from phalanx.trainer.parallel.mesh import Mesh
from phalanx.trainer.run.report import Validation
from phalanx.trainer.run.session import Session


def validate(session: Session, done: int) -> bool:
    """Measure the held-out loss, tell it and write it down; every rank calls it.

    It is a mean over tokens of the plain loss, over windows of which none comes twice: the same
    number for any batch, micro-batch and layout.

    Args:
        session: with held-out batches, or nothing is done.
        done: after how many steps.

    Returns:
        Whether somebody asked to stop, and nothing was measured.
    """
    if session.validation is None:
        return False
    engine, run, start = session.engine, session.run, time.perf_counter()
    executor = engine.forward_executor(run.micro_batches, run.layout.mb, engine.executor_seq)
    nats, tokens = 0.0, 0
    with session.meter.apart("validation", engine.mesh.ledger):
        for i in range(session.validation.num_batches):
            if somebody_stops(engine.mesh, requested=session.worker.stop.requested):
                session.events.note(f"step {done}: stopped before validation was over")
                return True
            faults.point("validation", step=done)
            part = evaluate(engine, executor, session.validation.batch(i, engine.positions()))
            nats, tokens = nats + part.nats, tokens + part.tokens
    loss, seconds = LossSum(nats, tokens).mean, time.perf_counter() - start
    session.meter.validations.append(Validation(done, loss, seconds))
    session.reporter.on_validation(done, loss)
    if session.directory and session.metrics:
        found = session.meter.validations[-1]
        session.metrics.amend(partial(session.directory.write_validation, found))
    return False


def somebody_stops(mesh: Mesh, *, requested: bool) -> bool:
    """Whether any rank was asked to stop; every rank calls it, and all get the same answer.

    Args:
        mesh: all ranks.
        requested: whether this one was asked to.
    """
    asked = torch.tensor(float(requested), device=mesh.device)
    mesh.world.all_reduce(asked, "stop", largest=True).wait()
    return bool(asked.item())
