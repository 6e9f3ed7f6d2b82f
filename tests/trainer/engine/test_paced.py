"""Stages that sleep, under the real executor and wire."""

import pytest
import torch

from phalanx.core.layout import Layout
from phalanx.core.schedule import Kind, Schedule
from phalanx.core.timeline import Span
from phalanx.oracle.pool import RankPool
from phalanx.schedules.build import lowered
from phalanx.schedules.text import parse_action
from phalanx.trainer.engine.executor import Executor
from phalanx.trainer.engine.paced import paced_stage
from phalanx.trainer.engine.recorder import Recorder
from phalanx.trainer.engine.update import UpdateRule
from phalanx.trainer.engine.wire import Form, Wire
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.parallel.comm import DirectGroup
from phalanx.trainer.parallel.ledger import Ledger

PACE = {Kind.FORWARD: 0.004, Kind.INPUT_GRAD: 0.002, Kind.WEIGHT_GRAD: 0.008}


def asleep(schedule: Schedule) -> list[Span]:
    """What this rank did of one pass."""
    rank = torch.distributed.get_rank()
    group = DirectGroup("pipeline", range(schedule.p), torch.distributed.group.WORLD, Ledger())
    form = Form((2,), torch.float32, torch.device("cpu"))
    stages = {
        stage: paced_stage(stage, PACE, form, ends=(stage + 1) % schedule.depth == 0)
        for stage in schedule.stages_of(rank)
    }
    recorder = Recorder(rank)
    recorder.keeps_spans = True
    none = torch.zeros((1, 1), dtype=torch.int64)
    batch = MicroBatch(none, none, none, None, none[0], seq=1, step=0)
    Executor(stages, Wire(group, schedule, form), recorder, UpdateRule()).run(
        [batch] * schedule.m, torch.ones(())
    )
    return [span for span in recorder.spans if span.category == "compute"]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_a_rank_sleeps_through_its_row_for_as_long_as_each_action_takes(
    ranks: RankPool, name: str
) -> None:
    schedule = lowered(Layout(pp=2, schedule=name), 4, reduce_every=False)
    whole = PACE | {Kind.BACKWARD: PACE[Kind.INPUT_GRAD] + PACE[Kind.WEIGHT_GRAD]}
    for rank, spans in enumerate(ranks.run(2, asleep, schedule)):
        row = [str(action) for action in schedule.rows[rank] if action.kind.computes]
        assert [span.label for span in spans] == row
        assert all(span.seconds >= whole[parse_action(span.label).kind] for span in spans)
