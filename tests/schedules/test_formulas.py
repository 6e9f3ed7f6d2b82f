"""The closed formulas that schedules bring along, held against their own rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.schedule import Kind, Schedule
from phalanx.schedules.formulas import Pipes, Seconds
from phalanx.schedules.play import play, seconds_table
from phalanx.schedules.registry import SPECS
from phalanx.schedules.spec import ScheduleSpec

PRICED = [spec for spec in SPECS if spec.can_be_searched]
EVEN_PASSES = st.tuples(st.floats(0.7, 2.5), st.floats(0.3, 1.1))  # I and W, where F is 1
EXACT = 1e-9


def lasts(schedule: Schedule, costs: np.ndarray, hop: float) -> float:
    """Seconds by playing the rows; costs are F, I, W of one copy, of shape (stages, 3)."""
    F, I, W = np.tile(costs, (schedule.copies, 1)).T  # noqa: E741  # the letters of the legend
    kinds = {Kind.FORWARD: F, Kind.BACKWARD: I + W, Kind.INPUT_GRAD: I, Kind.WEIGHT_GRAD: W}
    table = seconds_table(schedule, {kind: cost.tolist() for kind, cost in kinds.items()})
    return max(
        start + table[action.kind][action.stage]
        for row, starts in zip(schedule.rows, play(schedule, table, hop), strict=True)
        for action, start in zip(row, starts, strict=True)
    )


def formula(spec: ScheduleSpec, m: int, v: int, costs: np.ndarray, hop: float) -> float:
    """Seconds by the formula."""
    schedule = spec.build(len(costs) // v, m, v)
    work = np.tile(costs.sum(axis=1), schedule.copies)
    each = [work[list(schedule.stages_of(rank))].sum() for rank in range(schedule.p)]
    one = np.ones(1)
    pipes = Pipes(
        p=schedule.p * one,
        m=m * one,
        v=v * one,
        passes=Seconds(*(costs[:, i].mean() * one for i in range(3))),
        worst=max(each) / schedule.copies * one,
        total=costs.sum() * one,
        hop=hop * one,
    )
    assert spec.makespan is not None
    return float(spec.makespan(pipes)[0])


@pytest.mark.parametrize("spec", PRICED, ids=lambda spec: spec.name)
@settings(max_examples=15)
@given(p=st.sampled_from([2, 4, 6, 8]), turns=st.integers(2, 5), passes=EVEN_PASSES)
def test_with_equal_stages_a_formula_is_as_near_the_played_schedule_as_it_says(
    spec: ScheduleSpec, p: int, turns: int, passes: tuple[float, float]
):
    m, v = p * turns, spec.chunks.fewest(3)
    costs = np.tile((1.0, *passes), (p * v, 1))
    exact = lasts(spec.build(p, m, v), costs, 0.0)
    assert formula(spec, m, v, costs, 0.0) == pytest.approx(exact, rel=spec.error or EXACT)


@pytest.mark.parametrize(
    "spec", [s for s in PRICED if len(s.placement(2, 1).ranks) == 2], ids=lambda spec: spec.name
)
@settings(max_examples=15)
@given(
    p=st.sampled_from([2, 4, 8]),
    turns=st.integers(1, 5),
    passes=EVEN_PASSES,
    head=st.floats(0, 0.4),
    hop=st.floats(0, 0.05),
)
def test_a_heavier_last_stage_and_slow_messages_move_it_by_little(
    spec: ScheduleSpec, p: int, turns: int, passes: tuple[float, float], head: float, hop: float
):
    if not spec.ranks.hold(p) or not spec.chunks.hold(1):
        return
    costs = np.tile((1.0, *passes), (p, 1))
    costs[-1] *= 1 + head
    m = p * turns
    exact = lasts(spec.build(p, m, 1), costs, hop)
    assert formula(spec, m, 1, costs, hop) == pytest.approx(exact, rel=0.08)


HELD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1}


@pytest.mark.parametrize("spec", [s for s in SPECS if s.in_flight], ids=lambda spec: spec.name)
@given(p=st.integers(1, 8), m=st.integers(1, 24), v=st.integers(1, 3))
def test_what_ranks_hold_is_counted_on_the_rows(spec: ScheduleSpec, p: int, m: int, v: int):
    p, v = spec.ranks.fewest(p), spec.chunks.fewest(v)
    m = spec.micro_batches(p).fewest(m)
    rows = spec.build(p, m, v).rows
    steps = [np.cumsum([HELD.get(action.kind, 0) for action in row]) for row in rows]
    assert spec.peak_in_flight(p, m, v) == tuple(int(step.max()) for step in steps)
