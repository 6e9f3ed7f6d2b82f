"""Takes one step of one rank of a run, on tensors that have shapes and no values."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.errors import RefusedError
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.data.batches import Batch
from phalanx.dryrun.live_bytes import LiveBytes
from phalanx.dryrun.silent import silent_mesh
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.model.parameters import Box, Declaration

SCALAR = 1.0  # what every number is that the host asks for: finite, so that no step is skipped


class Rehearsal(NamedTuple):
    """What one rank did in a step.

    Attributes:
        messages: that it sent.
        peak_bytes: of tensors on its device, at the worst moment.
        seconds: that the rehearsal took.
    """

    messages: tuple[Message, ...]
    peak_bytes: int
    seconds: float


class KnownScalars(TorchDispatchMode):
    """Answers the host when it reads a number, which tensors without values cannot."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return SCALAR if args[0].is_floating_point() else int(SCALAR)
        return func(*args, **(kwargs or {}))


def rehearse(run: Run, rank: int) -> Rehearsal:
    """Build a rank and take one step.

    Args:
        run: that can be trained; its precision resolved.
        rank: which of its layout.

    Raises:
        RefusedError: state or activations leave the device, which needs real memory.
    """
    if run.layout.offload:
        raise RefusedError(
            f"offload={run.layout.offload} cannot be rehearsed: what leaves the device takes real "
            "memory of this machine; leave out offload"
        )
    run = replace(run, layout=replace(run.layout, compile=False), weights="")
    start = time.perf_counter()
    live = LiveBytes()
    with one_thread(), silent_mesh(run, rank) as mesh, _shapes(live):
        engine = build_engine(run, mesh, _no_values)
        live.expect_resizing(*(sharded.unit.weights for sharded in engine.units))
        _as_after_a_step(engine)
        batch = _batch(engine)
        for step in range(2 if run.layout.precision.recipe == "fp8" else 1):  # it calibrates first
            mesh.ledger.clear()
            live.forget()
            train_step(engine, step, batch)
        messages = tuple(mesh.ledger.messages())
    return Rehearsal(messages, live.peak, time.perf_counter() - start)


@contextmanager
def _shapes(live: LiveBytes) -> Iterator[None]:
    """Tensors without values, whose memory is counted all the same."""
    with ExitStack() as stack:
        values = KnownScalars()  # type: ignore[no-untyped-call]  # torch's
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), values, live):
            stack.enter_context(mode)
        yield


def _as_after_a_step(engine: Engine) -> None:
    """Have the memory that the first step would leave behind for all others."""
    for sharded in engine.units:
        if sharded.policy.retains_gradients:
            sharded.have_gradient()


def _no_values(declaration: Declaration, box: Box) -> Tensor:
    """The first weights of a rehearsal."""
    return torch.empty(box.sizes)


def _batch(engine: Engine) -> Batch:
    count, seq = len(engine.positions()), engine.run.recipe.seq
    tokens = np.zeros((count, seq), dtype=np.int64)
    positions = np.broadcast_to(np.arange(seq), (count, seq)).copy()
    return Batch(tokens=tokens, targets=tokens, positions=positions, documents=None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Where little or nothing is computed, several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
