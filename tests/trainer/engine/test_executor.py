from typing import NamedTuple

import pytest
import torch

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run
from phalanx.core.timeline import Timeline
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Case
from phalanx.schedules.build import build
from phalanx.trainer.engine.batching import count_valid, micro_batches
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.executor import ActionError, Executor
from phalanx.trainer.engine.step import forward_backward
from phalanx.trainer.engine.update import UpdateRule
from phalanx.trainer.parallel.mesh import build_mesh

CPU = torch.device("cpu")


class Trace(NamedTuple):
    """What a rank did in one pass.

    Attributes:
        computed: its computations, in order.
        row: its row of the schedule, without messages.
        held: tensors left in the executor afterwards.
        loss: summed, if this rank holds the last stage.
    """

    computed: list[str]
    row: list[str]
    held: int
    loss: float


def engine_of(run: Run) -> Engine:
    return build_engine(run, build_mesh(run.layout, CPU))


def one_pass(run: Run) -> Trace:
    """All forwards and backwards of one step."""
    engine = engine_of(run)
    engine.recorder.keeps_spans = True
    batches = micro_batches(engine, 0, Case(run).stream().batch(0, engine.positions()))
    executor = engine.executor
    losses = executor.run(batches, 1 / count_valid(engine, batches))
    return Trace(
        computed=[s.label for s in engine.recorder.spans if s.category == "compute"],
        row=[str(action) for action in executor.row if action.kind.computes],
        held=sum(len(left) for left in _left(executor)),
        loss=float(sum(losses)),
    )


def _left(executor: Executor) -> tuple[dict, ...]:
    return executor._inputs, executor._outputs, executor._ready, executor._deferred


def messages_in_time(run: Run) -> tuple[set[str | None], dict[str, float], dict[str, float]]:
    """Axes of messages that were seen under way; seconds of waiting by axis, seen and counted."""
    engine = engine_of(run)
    engine.recorder.keeps_spans = True
    engine.mesh.ledger.clear()
    forward_backward(engine, 0, Case(run).stream().batch(0, engine.positions()))
    spans = engine.recorder.spans
    under_way = [s for s in spans if s.axis and s.category == "communicate"]
    waits = [s for s in spans if s.axis and s.category == "wait"]
    for message, wait in zip(under_way, waits, strict=True):
        assert message.label == wait.label
        assert message.start <= wait.start <= wait.end == message.end
    seen = Timeline("measured", tuple(spans)).exposed_by_axis()
    return {message.axis for message in under_way}, seen, dict(engine.mesh.ledger.waited)


@pytest.mark.ranks
def test_messages_and_the_waits_for_them_are_seen_by_axis(ranks: RankPool) -> None:
    run = CaseSpec("dp=2 pp=2 tp=2 zero=3 mb=2").case().run
    for axes, seen, counted in ranks.run(8, messages_in_time, run):
        assert axes == {"data", "pipeline", "tensor", "world"}
        assert seen == pytest.approx(counted)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        "pp=2 schedule=gpipe",
        "pp=2",
        "pp=3 mb=2",
        "pp=2 v=2 schedule=interleaved",
        "dp=2 zero=3",
        "pp=2 schedule=zb-h1",
        "dp=2 pp=2 schedule=zb-h2 zero=3",
        "pp=2 schedule=zb-v",
        "pp=2 schedule=dualpipe",
        "pp=2 schedule=dualpipev",
    ],
)
def test_a_rank_computes_its_row_and_keeps_nothing(ranks: RankPool, layout: str) -> None:
    run = CaseSpec(layout).case().run
    for trace in ranks.run(run.layout.ranks, one_pass, run):
        assert trace.computed == trace.row
        assert trace.held == 0


@pytest.mark.ranks
def test_only_the_last_stage_knows_the_loss(ranks: RankPool) -> None:
    run = CaseSpec("pp=2").case().run
    first, last = ranks.run(2, one_pass, run)
    assert first.loss == 0
    assert last.loss > 0


def infer(run: Run) -> torch.Tensor | None:
    """This rank's logits of the first sequence."""
    engine = engine_of(run)
    batches = micro_batches(engine, 0, Case(run).stream().batch(0, engine.positions()))
    executor = engine.forward_executor(1, run.layout.mb, engine.executor_seq)
    return executor.infer(batches[0])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        "pp=2",
        "tp=2",
        "pp=2 tp=2",
        "pp=2 v=2 schedule=interleaved",
        "pp=2 schedule=zb-v",
        "pp=2 schedule=dualpipe",
    ],
)
def test_logits_do_not_depend_on_the_layout(ranks: RankPool, layout: str) -> None:
    (whole,) = ranks.run(1, infer, CaseSpec("dp=1").case().run)
    run = CaseSpec(layout).case().run
    parts = [part for part in ranks.run(run.layout.ranks, infer, run) if part is not None]
    assert len(parts) == run.layout.tp
    logits = torch.cat(parts, -1)
    assert logits.shape == (32, 1, 96)
    torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-13)


def test_a_failing_action_shows_its_row_with_the_place_marked() -> None:
    run = CaseSpec("dp=1 mb=2 zero=0").case().run
    engine = engine_of(run)
    batches = micro_batches(engine, 0, Case(run).stream().batch(0, engine.positions()))
    batches[1].tokens[0, 0] = run.model.vocab  # no row of the table has this number
    scale = 1 / count_valid(engine, batches)
    marked = "pipeline rank 0 failed at 0F1: 0F0 0B0 >0F1< 0B1 0F2 0B2 0F3 0REDUCE3 0B3; IndexError"
    with pytest.raises(ActionError, match=marked) as failed:
        engine.executor.run(batches, scale)
    assert isinstance(failed.value.__cause__, IndexError)


class Refusing(UpdateRule):
    """A rule under which nothing goes forward."""

    def before_forward(self, microbatch: int) -> None:
        raise RefusedError(f"micro-batch {microbatch} is not wanted; leave it out")


def test_what_a_user_can_mend_is_said_in_its_own_words() -> None:
    engine = engine_of(CaseSpec("dp=1 mb=4").case().run)
    old = engine.executor
    executor = Executor(old.stages, old.wire, old.recorder, Refusing())
    batches = micro_batches(engine, 0, Case(engine.run).stream().batch(0, engine.positions()))
    with pytest.raises(RefusedError, match=r"^micro-batch 0 is not wanted; leave it out$"):
        executor.run(batches, 1 / count_valid(engine, batches))


@pytest.mark.parametrize(
    ("place", "shown"),
    [(0, ">0F0< 0B0 0F1 0B1 0F2 0B2 0F3 ..."), (10, "... 0F2 0B2 0F3 0B3 0F4 0B4 >0F5< 0B5 0F6")],
)
def test_of_a_long_row_only_the_neighbourhood_is_shown(place: int, shown: str) -> None:
    row = build("1f1b", 1, 20).rows[0]
    assert f": {shown}" in str(ActionError(0, row, place, ValueError("no")))
