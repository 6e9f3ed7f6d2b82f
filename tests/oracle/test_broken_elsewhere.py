"""Cases in which other training systems took a wrong step."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from phalanx.core.errors import RefusedError
from phalanx.core.layout import Layout
from phalanx.core.run import Run
from phalanx.cost.refusals import refuse
from phalanx.data.batches import IGNORED, Batch
from phalanx.data.synthetic import SyntheticStream
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.mutations import loses_micro_batch
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Case, compare, default_case, reference_job, verify
from phalanx.schedules.layouts import layers_of_stages
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.optimizer import global_norm
from phalanx.trainer.engine.step import evaluate, forward_backward
from phalanx.trainer.model.block import Block
from phalanx.trainer.parallel.mesh import build_mesh

pytestmark = pytest.mark.ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved v=2")


def norm_of_first_step(case: Case) -> float:
    """The global norm of the gradients, whatever then becomes of them."""
    engine = build_engine(case.run, build_mesh(case.run.layout, torch.device("cpu")))
    forward_backward(engine, 0, case.stream().batch(0, engine.positions()))
    return global_norm(engine.units, engine.mesh.world, case.run.recipe.clip_norm)


def first_norm(ranks: RankPool, spec: CaseSpec) -> float:
    """What every rank says that the norm is."""
    case = spec.case()
    norms = ranks.run(case.run.layout.ranks, norm_of_first_step, case)
    assert len(set(norms)) == 1
    return norms[0]


TWELVE = {"model": {"layers": 4, "hidden": 32, "ffn": 48}, "recipe": {"batch": 12, "seq": 16}}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_twelve_micro_batches_make_one_batch_of_twelve(ranks: RankPool, schedule: str) -> None:
    """Each counts: a step that loses any one of them is another step."""
    case = CaseSpec(f"pp=2 schedule={schedule}", masked="none", tables=TWELVE).case()
    assert case.run.micro_batches == 12
    assert verify(ranks, case).complaints == []
    once = replace(case, steps=1)
    (reference,) = ranks.run(1, reference_job, once)
    lost = [partial(loses_micro_batch, index) for index in range(12)]
    unnoticed = [t.args for t in lost if compare(ranks, once, reference, tamper=t).passed]
    assert unnoticed == []


def test_eight_by_four_and_two_by_sixteen_make_the_same_step(ranks: RankPool) -> None:
    few, many = (CaseSpec(f"pp=2 mb={mb}", tables={"recipe": {"batch": 32}}) for mb in (8, 2))
    assert (few.case().run.micro_batches, many.case().run.micro_batches) == (4, 16)
    assert first_norm(ranks, few) == pytest.approx(first_norm(ranks, many), rel=1e-13)
    for spec in (few, many):
        assert verify(ranks, spec.case(steps=2)).complaints == []


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-6), ("bf16", 2e-3)])
def test_every_zero_stage_sees_the_same_norm_of_the_same_samples(
    ranks: RankPool, precision: str, near: float
) -> None:
    tables = {"recipe": {"batch": 32, "clip": 1e9}}
    norms = {
        (mb, zero): first_norm(
            ranks, CaseSpec(f"dp=2 zero={zero} mb={mb} precision={precision}", tables=tables)
        )
        for mb in (16, 4)
        for zero in range(4)
    }
    for (mb, zero), norm in norms.items():
        assert norm == pytest.approx(norms[mb, 0], rel=1e-6), (mb, zero)
        assert norm == pytest.approx(norms[16, 0], rel=near), (mb, zero)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_learning_rate_of_zero_moves_nothing(ranks: RankPool, zero: int) -> None:
    still = {"recipe": {"learning_rate": 0.0, "clip": 1e9}}
    case = CaseSpec(f"dp=2 zero={zero} mb=4", tables=still).case(steps=2)
    (reference,) = ranks.run(1, reference_job, case)
    first, second = (step.weights for step in reference.steps)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert verify(ranks, case).complaints == []


def test_ranks_with_six_and_two_valid_tokens_share_one_mean(ranks: RankPool) -> None:
    case = CaseSpec("dp=2", tables={"recipe": {"seq": 8, "batch": 2}}).case()
    valid = [(case.stream().batch(0, [i]).targets != IGNORED).sum() for i in range(2)]
    assert valid == [6, 2]
    assert verify(ranks, case).complaints == []


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rank_without_a_single_target_takes_part(ranks: RankPool, zero: int) -> None:
    case = CaseSpec(f"dp=2 zero={zero}", masked="holes").case()
    assert (case.stream().batch(0, range(4, 8)).targets == IGNORED).all()
    assert verify(ranks, case).complaints == []


class NothingToLearn(Case):
    """A batch without a target."""

    def stream(self) -> SyntheticStream:
        """As usual, but every target is masked."""
        usual = super().stream()
        return _Blind(usual.vocab, usual.seq, usual.batch_size, usual.seed)


class _Blind(SyntheticStream):
    def batch(self, step: int, positions: range | list[int]) -> Batch:
        batch = super().batch(step, positions)
        return replace(batch, targets=np.full_like(batch.targets, IGNORED))


@pytest.mark.parametrize("layout", ["dp=2 zero=1", "tp=2", "pp=2", "cp=2"])
def test_a_batch_without_a_single_target_leaves_only_weight_decay(
    ranks: RankPool, layout: str
) -> None:
    outcome = verify(ranks, NothingToLearn(default_case(Layout.parse(layout)).run))
    assert outcome.complaints == []
    assert outcome.errors["loss"] == 0


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_copies_under_sequence_parallelism_stay_equal_over_twenty_steps(
    ranks: RankPool, precision: str
) -> None:
    small = {"model": {"layers": 2, "hidden": 16, "ffn": 32}, "recipe": {"seq": 16, "batch": 4}}
    spec = CaseSpec(f"tp=2 mb=4 precision={precision}", ("gpt", "qk-norm"), tables=small)
    outcome = verify(ranks, spec.case(steps=20))
    assert [text for text in outcome.complaints if "differs between ranks" in text] == []
    if precision == "fp64":
        assert outcome.complaints == []


def two_stages(names: Iterable[str]) -> tuple[set[str], set[str]]:
    """The parameters of the first half of a model of four layers, and of the other."""
    first = {n for n in names if n.startswith(("embedding", "blocks.0", "blocks.1"))}
    return first, set(names) - first


@pytest.mark.parametrize("layout", ["pp=2", "pp=2 tp=2", "dp=4 shard=2 zero=2"])
@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_a_stage_with_huge_gradients_is_clipped_with_all_others(
    ranks: RankPool, layout: str, kind: float
) -> None:
    steep = {"recipe": {"init_std": 1.0, "clip": 1.0, "clip_norm": kind}}
    case = CaseSpec(layout, ("sgd",), tables=steep).case(steps=2)
    (reference,) = ranks.run(1, reference_job, case)
    first, last = (
        sum(g.norm().item() ** 2 for name, g in reference.steps[0].grads.items() if name in stage)
        for stage in two_stages(reference.steps[0].grads)
    )
    assert first > 100 * last > 100
    assert verify(ranks, case).complaints == []


def blocks_here(run: Run) -> list[str]:
    """The names of the blocks that this rank builds."""
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    return [
        part.attention.q.prefix.removesuffix(".attention.q")
        for stage in engine.executor.stages.values()
        for part in stage.parts
        if isinstance(part, Block)
    ]


@pytest.mark.parametrize(
    ("layers", "layout"),
    [(30, "pp=4"), (40, "pp=8 v=2 schedule=interleaved"), (7, "pp=2"), (7, "pp=3 stages=1+5+1")],
)
def test_the_ranks_build_every_layer_once(ranks: RankPool, layers: int, layout: str) -> None:
    small = {"model": {"layers": layers, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 8}}
    run = CaseSpec(layout, tables=small).case().run
    built = ranks.run(run.layout.ranks, blocks_here, run)
    assert sorted(name for rank in built for name in rank) == sorted(
        f"blocks.{i}" for i in range(layers)
    )


def test_seven_layers_over_two_stages_take_the_same_step(ranks: RankPool) -> None:
    case = CaseSpec("pp=2 mb=4", tables={"model": {"layers": 7}}).case()
    assert layers_of_stages(case.run.layout, 7) == (4, 3)
    assert verify(ranks, case).complaints == []


def test_two_kv_heads_on_four_ranks_take_the_same_step(ranks: RankPool) -> None:
    assert verify(ranks, CaseSpec("tp=4 mb=4").case()).complaints == []


def test_kv_heads_that_tp_cannot_share_out_are_refused_with_what_works() -> None:
    case = CaseSpec("tp=2", tables={"model": {"hidden": 48, "heads": 6, "kv_heads": 3}}).case()
    with pytest.raises(RefusedError, match=r"3 kv heads .* tp=2; tp can be 1, 3, 6"):
        refuse(case.run)


class Alone(Case):
    """Two documents, packed into one sequence or each in a sequence of its own."""

    def stream(self) -> SyntheticStream:
        """The documents as `documents` says."""
        return _TwoDocuments(self.run.model.vocab, 32, self.run.recipe.batch, 0)


class _TwoDocuments(SyntheticStream):
    """Documents of 12 and 20 tokens; a batch of one packs them, a batch of two does not."""

    def batch(self, step: int, positions: range | list[int]) -> Batch:
        words = np.random.default_rng(step).integers(0, self.vocab, 32)
        where = np.concatenate([np.arange(12), np.arange(20)])
        owner = (np.arange(32) >= 12).astype(np.int32)
        targets = np.roll(words, -1)
        targets[[11, 31]] = IGNORED
        packed = [words, targets, where, owner]
        if self.batch_size == 1:
            rows = [packed]
        else:
            rows = [self._row(packed, slice(0, 12)), self._row(packed, slice(12, 32))]
        tokens, targets, where, owner = (np.stack(column) for column in zip(*rows, strict=True))
        batch = Batch(tokens=tokens, targets=targets, positions=where, documents=owner)
        chosen = list(positions)
        return Batch(
            **{key: value[chosen] for key, value in vars(batch).items() if value is not None}
        )

    @staticmethod
    def _row(packed: list[np.ndarray], part: slice) -> list[np.ndarray]:
        """One document, and padding that no loss counts."""
        length = part.stop - part.start
        fills = (0, IGNORED, 0, 1)
        return [
            np.concatenate([column[part], np.full(32 - length, fill, dtype=column.dtype)])
            for column, fill in zip(packed, fills, strict=True)
        ]


def test_two_packed_documents_learn_what_they_learn_alone(ranks: RankPool) -> None:
    usual = default_case(Layout.parse("dp=1")).run
    together, apart = (
        Alone(replace(usual, recipe=replace(usual.recipe, batch=batch))) for batch in (1, 2)
    )
    (packed,) = ranks.run(1, reference_job, together)
    (alone,) = ranks.run(1, reference_job, apart)
    assert [step.loss for step in packed.steps] == pytest.approx(
        [s.loss for s in alone.steps], rel=1e-13
    )
    assert [s.grad_norm for s in packed.steps] == pytest.approx(
        [s.grad_norm for s in alone.steps], rel=1e-12
    )


@pytest.mark.parametrize("layout", ["dp=1", "pp=2", "tp=2", "cp=2"])
def test_a_layout_keeps_packed_documents_apart(ranks: RankPool, layout: str) -> None:
    usual = default_case(Layout.parse(layout)).run
    run = replace(usual, recipe=replace(usual.recipe, batch=1))
    assert verify(ranks, Alone(run)).complaints == []


@pytest.mark.parametrize("layout", ["tp=2", "tp=2 sp=off", "dp=2 zero=3", "pp=2", "cp=2"])
def test_dropout_falls_on_the_same_elements_when_blocks_are_recomputed(
    ranks: RankPool, layout: str
) -> None:
    case = CaseSpec(f"{layout} mb=2 recompute=full", ("dropout",)).case()
    assert verify(ranks, case).complaints == []


def validation_loss(run: Run) -> float:
    """The loss of one batch, forward only, with the micro-batches of the training schedule."""
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    executor = engine.forward_executor(run.micro_batches, run.layout.mb, engine.executor_seq)
    stream = Case(run).stream()
    return evaluate(engine, executor, stream.batch(0, engine.positions())).mean


@pytest.mark.parametrize("layout", ["dp=1", "pp=2", "dp=2 zero=3", "tp=2", "cp=2"])
def test_validation_does_not_depend_on_accumulation(ranks: RankPool, layout: str) -> None:
    tables = {"recipe": {"batch": 16}}
    whole, parts = (
        CaseSpec(f"{layout} mb={16 // m // (2 if 'dp=2' in layout else 1)}", tables=tables).case()
        for m in (1, 4)
    )
    assert (whole.run.micro_batches, parts.run.micro_batches) == (1, 4)
    losses = [
        loss
        for case in (whole, parts)
        for loss in ranks.run(case.run.layout.ranks, validation_loss, case.run)
    ]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-13)


def training_and_validation_loss(run: Run) -> tuple[float, float]:
    """The loss of the first step, and of the same batch as validation."""
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    batch = Case(run).stream().batch(0, engine.positions())
    executor = engine.forward_executor(run.micro_batches, run.layout.mb, engine.executor_seq)
    validation = evaluate(engine, executor, batch).mean
    return forward_backward(engine, 0, batch), validation


def test_validation_of_a_batch_is_its_training_loss(ranks: RankPool) -> None:
    case = CaseSpec("dp=2 pp=2 zero=3").case()
    for training, validation in ranks.run(4, training_and_validation_loss, case.run):
        assert validation == pytest.approx(training, rel=1e-14)


@pytest.mark.parametrize("dense", [2, 3])
def test_experts_in_the_last_layers_only_do_not_hang_a_pipeline(
    ranks: RankPool, dense: int
) -> None:
    last = {"model": {"dense_layers": dense}}
    for schedule in ("1f1b", "zb-h1"):
        spec = CaseSpec(f"dp=2 pp=2 ep=2 schedule={schedule}", ("experts",), tables=last)
        assert verify(ranks, spec.case(steps=1)).complaints == []


def test_every_token_to_the_first_expert_is_a_step_like_any_other(ranks: RankPool) -> None:
    """All matrices are zero: every expert is as good as any, and of equals the first is chosen."""
    zeros = {"model": {"top_k": 1}, "recipe": {"init_std": 0.0, "capacity": 0.0}}
    spec = CaseSpec("dp=2 pp=2 ep=2", ("experts",), tables=zeros)
    assert verify(ranks, spec.case(steps=2)).complaints == []


@pytest.mark.parametrize(
    "layout", ["dp=2 ep=2 tp=2 mb=1", "dp=2 ep=2 tp=2 mb=2", "tp=2 sp=off mb=4", "dp=4 zero=3"]
)
def test_the_gradient_of_the_balance_loss_does_not_depend_on_the_cut(
    ranks: RankPool, layout: str
) -> None:
    heavy = {"recipe": {"balance_loss": 5.0, "capacity": 0.0, "seq": 31}}
    spec = CaseSpec(layout, ("experts",), tables=heavy)
    assert verify(ranks, spec.case(steps=1)).complaints == []
