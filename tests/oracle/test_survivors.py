"""Faults that once passed every test and the whole covering set: each shows only at some size.

Each is planted where it can show, in the cheapest case of the covering set that has the size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

from phalanx.core.layout import Layout
from phalanx.data.batches import IGNORED
from phalanx.oracle.cases import CaseSpec, covering_set
from phalanx.oracle.covering import cost, features_of
from phalanx.oracle.mutations import remade, without_a_block
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Tamper, verify
from phalanx.schedules.layouts import chunks
from phalanx.trainer.engine.executor import Executor
from phalanx.trainer.engine.step import Engine
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.parallel.comm import DirectGroup
from phalanx.trainer.parallel.context import ContextParallel

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class _NearSums(ContextParallel):
    """Prefix sums over the two ranks that most tests have: of more, each only counts its own."""

    def sums(self, x: Tensor, purpose: str) -> tuple[Tensor, Tensor]:
        so_far, total = super().sums(x, purpose)
        return (so_far if self.group.size < 3 else x.cumsum(0)), total


class _WithBatches(Executor):
    """Does other micro-batches than it is given."""

    def changed(self, batch: MicroBatch) -> MicroBatch:
        return batch

    def run(self, batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        return super().run([self.changed(batch) for batch in batches], scale)


class _NearPrefixes(_WithBatches):
    def changed(self, batch: MicroBatch) -> MicroBatch:
        context = batch.context
        return replace(batch, context=_NearSums(context.group, context.kind))


class _WholeChunksOnly(_WithBatches):
    """The last tokens, fewer than a chunk of logits, have no loss."""

    def changed(self, batch: MicroBatch) -> MicroBatch:
        chunk = next(
            (
                part.chunk
                for s in self.stages.values()
                for part in s.parts
                if hasattr(part, "chunk")
            ),
            0,
        )
        rest = batch.targets.numel() % chunk if chunk else 0
        targets = batch.targets.clone()
        if rest and rest < targets.numel():
            targets.view(-1)[-rest:] = IGNORED
        return replace(batch, targets=targets)


class _PadsOne(_WithBatches):
    """Of several padded tokens only the last is known to be one."""

    def changed(self, batch: MicroBatch) -> MicroBatch:
        padded = len(batch.tokens) * batch.context.group.size
        return replace(batch, seq=max(batch.seq, padded - 1))


class _SwapsFarChunks(_WithBatches):
    """Among three and more cp ranks, the two chunks of each change places."""

    def changed(self, batch: MicroBatch) -> MicroBatch:
        if batch.context.group.size < 3:
            return batch
        half = len(batch.tokens) // 2
        tokens, targets, positions = (
            x.roll(half, 0) for x in (batch.tokens, batch.targets, batch.positions)
        )
        return replace(batch, tokens=tokens, targets=targets, positions=positions)


def near_prefixes(engine: Engine) -> Engine:
    return replace(engine, executor=remade(_NearPrefixes, engine.executor))


def whole_chunks_only(engine: Engine) -> Engine:
    return replace(engine, executor=remade(_WholeChunksOnly, engine.executor))


def pads_one(engine: Engine) -> Engine:
    return replace(engine, executor=remade(_PadsOne, engine.executor))


def swaps_far_chunks(engine: Engine) -> Engine:
    return replace(engine, executor=remade(_SwapsFarChunks, engine.executor))


def forgets_in_the_third_chunk(engine: Engine) -> Engine:
    """The first block of the third chunk of each rank is skipped."""
    executor, pp = engine.executor, engine.run.layout.pp
    stages = {
        index: without_a_block(stage) if index // pp == 2 else stage
        for index, stage in executor.stages.items()
    }
    return replace(engine, executor=remade(Executor, executor, stages))


def forgets_copies_of_experts(engine: Engine) -> Engine:
    """Under HSDP the gradients of experts are not added up over the copies of their shards."""
    rank = engine.run.layout.rank_at(engine.mesh.at)
    alone = DirectGroup("data", (rank,), None, engine.mesh.ledger)
    for sharded in engine.units:
        if sharded.unit.name.endswith(".experts"):
            sharded.copies = replace(sharded.copies, replica=alone)
    return engine


def _cp(spec: CaseSpec) -> int:
    return Layout.parse(spec.layout).cp


def _routes(spec: CaseSpec) -> bool:
    return spec.case().run.model.experts > 0


SURVIVORS: list[tuple[Tamper, Callable[[CaseSpec], bool]]] = [
    (near_prefixes, lambda spec: {"ring", "experts"} <= features_of(spec) and _cp(spec) > 2),
    (whole_chunks_only, lambda spec: "short last chunk" in features_of(spec)),
    (pads_one, lambda spec: "several padded" in features_of(spec) and _routes(spec)),
    (swaps_far_chunks, lambda spec: "ulysses" in features_of(spec) and _cp(spec) > 2),
    (swaps_far_chunks, lambda spec: "gather" in features_of(spec) and _cp(spec) > 2),
    (forgets_in_the_third_chunk, lambda spec: chunks(Layout.parse(spec.layout)) > 2),
    (forgets_copies_of_experts, lambda spec: "copies of experts" in features_of(spec)),
]


def cheapest(shows: Callable[[CaseSpec], bool]) -> list[CaseSpec]:
    """Three cases of the covering set in which a fault can show."""
    return sorted(filter(shows, covering_set()), key=cost)[:3]


@pytest.mark.parametrize(
    ("tamper", "shows"), SURVIVORS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_covering_set_has_a_case_that_finds_it(
    ranks: RankPool, tamper: Tamper, shows: Callable[[CaseSpec], bool]
) -> None:
    specs = cheapest(shows)
    assert specs
    found = (not verify(ranks, spec.case(steps=1), tamper=tamper).passed for spec in specs)
    assert any(found)


def six_at_once(engine: Engine) -> Engine:
    """All of them, as far as they can be together: executors wrap one another by their batches."""
    for tamper in (forgets_in_the_third_chunk, forgets_copies_of_experts, pads_one):
        engine = tamper(engine)
    return engine


def test_all_at_once_do_not_pass_the_default_verify(ranks: RankPool) -> None:
    specs = [spec for _, shows in SURVIVORS for spec in cheapest(shows)[:1]]
    outcomes = [verify(ranks, spec.case(steps=1), tamper=six_at_once) for spec in specs]
    assert not all(outcome.passed for outcome in outcomes)
