"""Wrong messages and wrong steps, made on purpose: the oracle must notice every one.

A mutation that it does not notice is a hole in the oracle.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.message import Axis, Collective, Message
from phalanx.data.batches import IGNORED
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.engine.executor import Executor
from phalanx.trainer.engine.optimizer import PendingScalar
from phalanx.trainer.engine.update import Update, UpdateRule
from phalanx.trainer.engine.weight_gradients import Deferred, WeightGradients
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.block import Block
from phalanx.trainer.model.stage import Stage
from phalanx.trainer.parallel.comm import DirectGroup, Part, Pending, UnevenSplits
from phalanx.trainer.parallel.data import ShardedUnit
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.precision.fused import FusedAdamW

Fault = Literal["lost", "doubled", "swapped"]

# What can go wrong with a message and still leave every rank at the next one.
FAULTS: dict[Collective, tuple[Fault, ...]] = {
    "all_reduce": ("lost", "doubled"),
    "all_gather": ("lost", "swapped"),
    "reduce_scatter": ("lost", "doubled", "swapped"),
    "all_to_all": ("lost", "doubled", "swapped"),
    "send": ("lost", "doubled"),
}

# How many rows come decides the size of the next message: a wrong number would hang, or be refused
# by the size of the rows that come, and so cannot be a wrong update.
COUNTS = "rows per expert"

# Softmax does not change when the same number is subtracted from all logits of a token: the
# largest is subtracted only so that nothing overflows. Biases of experts follow the sign of a
# difference of loads.
HARMLESS = {
    ("loss maximum", "doubled"),
    ("expert loads", "doubled"),
    ("expert loads both ways", "doubled"),
}


@dataclass(frozen=True)
class Mutation:
    """One purpose whose messages go wrong; stands for a type of groups in `build_mesh`.

    Attributes:
        collective: of the messages.
        purpose: of the messages.
        fault: lost: ranks keep what they had (of a gather, zeros in the place of the others'
            parts; of a message between stages, zeros). doubled: twice the right result. swapped:
            each rank gets, or gives, the part of its neighbour.
    """

    collective: Collective
    purpose: str
    fault: Fault

    def __call__(
        self, axis: Axis, ranks: Sequence[int], handle: dist.ProcessGroup | None, ledger: Ledger
    ) -> "MutatedGroup":
        """A group that suffers from it."""
        group = MutatedGroup(axis, ranks, handle, ledger)
        group.mutation = self
        return group

    def __str__(self) -> str:
        """For example `all_reduce of loss sums lost`."""
        return f"{self.collective} of {self.purpose} {self.fault}"


def mutations_of(traffic: Iterable[Message]) -> list[Mutation]:
    """Everything that can go wrong with messages that were sent."""
    sent = sorted({(transfer.collective, transfer.purpose) for transfer in traffic})
    return [
        Mutation(collective, purpose, fault)
        for collective, purpose in sent
        for fault in FAULTS[collective]
        if (purpose, fault) not in HARMLESS and purpose != COUNTS
    ]


class MutatedGroup(DirectGroup):
    """Carries messages as a `DirectGroup`, but for those that a mutation names."""

    mutation: Mutation

    def _fault(self, collective: Collective, purpose: str) -> Fault | None:
        named = (self.mutation.collective, self.mutation.purpose)
        return self.mutation.fault if (collective, purpose) == named else None

    def _all_reduce(self, x: Tensor, purpose: str, largest: bool) -> Pending:
        fault = self._fault("all_reduce", purpose)
        if fault == "lost":
            return Pending()
        pending = super()._all_reduce(x, purpose, largest)
        return _then(pending, lambda: x.mul_(2)) if fault else pending

    def _all_gather(self, out: Tensor, x: Tensor, purpose: str) -> Pending:
        fault = self._fault("all_gather", purpose)
        chunks = out.view(-1).chunk(self.size)
        if fault == "lost":
            chunks[self.index].copy_(x.view(-1))
            for peer in self._peers():
                chunks[peer].zero_()
            return Pending()
        pending = super()._all_gather(out, x, purpose)
        return _then(pending, lambda: _rotate(out, self.size)) if fault else pending

    def _reduce_scatter(self, out: Tensor, x: Tensor, purpose: str) -> Pending:
        fault = self._fault("reduce_scatter", purpose)
        if fault == "lost":
            out.view(-1).copy_(x.view(-1).chunk(self.size)[self.index])
            return Pending()
        if fault == "swapped":
            _rotate(x, self.size)
        pending = super()._reduce_scatter(out, x, purpose)
        return _then(pending, lambda: out.mul_(2)) if fault == "doubled" else pending

    def _all_gather_parts(self, out: Tensor, x: Tensor, purpose: str) -> list[Part]:
        if not self._fault("all_gather", purpose):
            return super()._all_gather_parts(out, x, purpose)
        pending = self._all_gather(out, x, purpose)
        return [Part(i, part, pending) for i, part in enumerate(out.chunk(self.size))]

    def _reduce_scatter_parts(
        self, out: Tensor, make: Callable[[int], Tensor], purpose: str
    ) -> Pending:
        if not self._fault("reduce_scatter", purpose):
            return super()._reduce_scatter_parts(out, make, purpose)
        whole = torch.cat([make(i) for i in range(self.size)])
        return self._reduce_scatter(out, whole, purpose)

    def _all_to_all(
        self, out: Tensor, x: Tensor, purpose: str, rows: UnevenSplits | None
    ) -> Pending:
        fault = self._fault("all_to_all", purpose)
        pending = super()._all_to_all(out, x, purpose, rows)
        if fault == "lost":
            parts = self._split(out, rows.come if rows else None)
            peers = [parts[i] for i in self._peers()]
            return _then(pending, lambda: [part.zero_() for part in peers])
        if fault == "swapped":
            return _then(pending, lambda: _rotate(out, self.size))
        return _then(pending, lambda: out.mul_(2)) if fault else pending

    def _send(self, x: Tensor, to: int, purpose: str, tag: int) -> Pending:
        fault = self._fault("send", purpose)
        factor = {"lost": 0, "doubled": 2}.get(fault or "", 1)
        return super()._send(x * factor, to, purpose, tag)


def _then(pending: Pending, action: Callable[[], object]) -> Pending:
    """A message that does one thing more when it has arrived."""

    def finish() -> None:
        pending.wait()
        action()

    return Pending([None], finish, pending.buffers)


def _rotate(x: Tensor, parts: int) -> None:
    """Move every part of `x` to the place of the next."""
    flat = x.view(-1)
    flat.copy_(flat.roll(flat.numel() // parts))


def divides_by_micro_batches(engine: Engine) -> Engine:
    """The loss of each micro-batch is averaged once more over micro-batches."""
    return replace(engine, executor=remade(_DividesByMicroBatches, engine.executor))


def keeps_the_last_micro_batch(engine: Engine) -> Engine:
    """Each backward overwrites the gradients of the one before."""
    rule, old = _KeepsTheLast(engine.rule, engine.units), engine.executor
    executor = Executor(old.stages, old.wire, old.recorder, rule)
    return replace(engine, rule=rule, executor=executor)


def forgets_weights_once(engine: Engine) -> Engine:
    """The last split backward of each stage never gets to its weights."""
    m = engine.executor.wire.schedule.m
    stages = {
        index: replace(stage, gradients=_ForgetsWeightsOnce(stage.gradients, m))
        for index, stage in engine.executor.stages.items()
    }
    return replace(engine, executor=remade(Executor, engine.executor, stages))


def forgets_documents(engine: Engine) -> Engine:
    """Tokens look into the document before theirs."""
    return replace(engine, executor=remade(_ForgetsDocuments, engine.executor))


def swaps_chunks(engine: Engine) -> Engine:
    """Both chunks of a cp rank change places; positions go with them, and only masks are wrong."""
    return replace(engine, executor=remade(_SwapsChunks, engine.executor))


def loses_micro_batch(index: int, engine: Engine) -> Engine:
    """One micro-batch of this rank has no loss.

    Args:
        index: of the micro-batch, from 0.
        engine: comes back with another executor.
    """
    executor = remade(_LosesOne, engine.executor)
    executor.lost = index  # type: ignore[attr-defined]  # of the kind that it is remade into
    return replace(engine, executor=executor)


def skips_a_block(engine: Engine) -> Engine:
    """Each rank leaves one block out; its weights are still there."""
    stages = {index: without_a_block(stage) for index, stage in engine.executor.stages.items()}
    return replace(engine, executor=remade(Executor, engine.executor, stages))


def decays_vectors(engine: Engine) -> Engine:
    """Weight decay reaches norms and biases."""
    for of in engine.optimizer.of.values():
        if isinstance(of.torch, FusedAdamW):
            of.torch.stretches = [stretch._replace(decays=True) for stretch in of.torch.stretches]
    return engine


def counts_copies(engine: Engine) -> Engine:
    """Both copies of tied embeddings count in the norm."""
    for unit in engine.units:
        unit.unit.counted = True
    return engine


def starts_one_step_late(engine: Engine) -> Engine:
    """The learning rate is that of the next step."""
    engine.optimizer.updates += 1
    return engine


def starts_elsewhere(engine: Engine) -> Engine:
    """Every rank but the first draws other initial weights."""
    rank = engine.run.layout.rank_at(engine.mesh.at)
    for sharded in engine.units:
        for weights in (sharded.unit.weights, sharded.unit.master):
            weights.mul_(1 + 1e-6 * rank)
    return engine


def drops_by_rank(engine: Engine) -> Engine:
    """The masks of dropout depend on the rank."""
    rank = engine.run.layout.rank_at(engine.mesh.at)
    for stage in engine.executor.stages.values():
        for part in stage.parts:
            if isinstance(part, Block):
                part.drop_attention.seed += rank
                part.drop_mlp.seed += rank
    return engine


def remade(
    kind: type[Executor], executor: Executor, stages: Mapping[int, Stage] | None = None
) -> Executor:
    """The same executor of another kind, perhaps with other stages.

    Args:
        kind: of executor.
        executor: whose wire, recorder and rule it takes over.
        stages: by index; None takes over those of `executor`.
    """
    return kind(stages or executor.stages, executor.wire, executor.recorder, executor.rule)


class _DividesByMicroBatches(Executor):
    def run(self, batches: Sequence[MicroBatch], scale: Tensor) -> list[Tensor]:
        return super().run(batches, scale / len(batches))


class _LosesOne(Executor):
    lost = 0

    def run(self, batches: Sequence[MicroBatch], scale: Tensor) -> list[Tensor]:
        blind = torch.full_like(batches[self.lost].targets, IGNORED)
        rest = list(batches)
        rest[self.lost] = replace(rest[self.lost], targets=blind)
        return super().run(rest, scale)


class _ForgetsWeightsOnce(WeightGradients):
    """Does all that was deferred but for one of so many."""

    def __init__(self, gradients: WeightGradients, times: int) -> None:
        self._gradients, self._left = gradients, times

    @contextmanager
    def deferring(self) -> Iterator[Deferred]:
        with self._gradients.deferring() as deferred:
            yield deferred

    def do(self, deferred: Deferred) -> None:
        self._left -= 1
        if not self._left:
            deferred.clear()
        self._gradients.do(deferred)


class _ForgetsDocuments(Executor):
    def run(self, batches: Sequence[MicroBatch], scale: Tensor) -> list[Tensor]:
        return super().run([replace(batch, documents=None) for batch in batches], scale)


class _SwapsChunks(Executor):
    def run(self, batches: Sequence[MicroBatch], scale: Tensor) -> list[Tensor]:
        return super().run([_chunks_swapped(batch) for batch in batches], scale)


def _chunks_swapped(batch: MicroBatch) -> MicroBatch:
    half = len(batch.tokens) // 2
    tokens, targets, positions = (
        x.roll(half, 0) for x in (batch.tokens, batch.targets, batch.positions)
    )
    return replace(batch, tokens=tokens, targets=targets, positions=positions)


class _KeepsTheLast(UpdateRule):
    """Another rule, but each backward begins without what has accumulated."""

    def __init__(self, rule: UpdateRule, units: Sequence[ShardedUnit]) -> None:
        self._rule, self._units = rule, units

    def around_backward(self, microbatch: int) -> AbstractContextManager[None]:
        for unit in self._units:
            unit.overwrite()
        return self._rule.around_backward(microbatch)

    def finish(self, loss: PendingScalar) -> Update:
        return self._rule.finish(loss)


def without_a_block(stage: Stage) -> Stage:
    """A stage that leaves its first block out."""
    skipped = next(i for i, part in enumerate(stage.parts) if isinstance(part, Block))
    kept = [i for i in range(len(stage.parts)) if i != skipped]
    parts, units = [stage.parts[i] for i in kept], [stage.units[i] for i in kept]
    return replace(stage, parts=tuple(parts), units=tuple(units))
