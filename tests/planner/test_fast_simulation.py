import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.schedule import Kind
from phalanx.planner import fast_simulation
from phalanx.planner.simulate import occupancy, simulate
from phalanx.schedules.build import build

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev"]


@st.composite
def played(draw):
    name = draw(st.sampled_from(NAMES))
    p = 2 * draw(st.integers(1, 3))
    m = p * draw(st.integers(2, 9))
    v = draw(st.integers(2, 3)) if name == "interleaved" else None
    stages = build(name, p, m, v).num_stages
    costs = draw(
        st.lists(
            st.lists(st.integers(4, 12), min_size=stages, max_size=stages), min_size=3, max_size=3
        )
    )
    return name, p, m, v, np.array(costs, dtype=float), float(draw(st.integers(0, 3)))


def costs_of(table):
    forward, inputs, weights = (row[None, :] for row in table)
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: inputs + weights,
        Kind.INPUT_GRAD: inputs,
        Kind.WEIGHT_GRAD: weights,
    }


def lasts_exactly(name, p, m, v, costs, hop):
    per_stage = {kind: list(values[0]) for kind, values in costs.items()}
    return occupancy(simulate(build(name, p, m, v), per_stage, hop)).makespan


@settings(max_examples=60, deadline=None)
@given(played())
def test_the_pace_is_that_of_the_simulation_within_five_percent_however_unequal_the_stages(drawn):
    name, p, m, v, table, hop = drawn
    costs = costs_of(table)
    lasts = fast_simulation.makespans(name, p, m, v, costs, np.array([hop]))[0]
    assert lasts == pytest.approx(lasts_exactly(name, p, m, v, costs, hop), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(played())
def test_a_short_step_is_played_exactly(drawn):
    name, p, _, v, table, hop = drawn
    m = fast_simulation.PERIODS[1] * p
    costs = costs_of(table)
    lasts = fast_simulation.makespans(name, p, m, v, costs, np.array([hop]))[0]
    assert lasts == pytest.approx(lasts_exactly(name, p, m, v, costs, hop), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [16, 160])
def test_equal_stages_are_continued_exactly(name, m):
    v = 2 if name == "interleaved" else None
    stages = build(name, 4, m, v).num_stages
    costs = costs_of(np.array([[1.0], [1.25], [0.75]]) * np.ones(stages))
    lasts = fast_simulation.makespans(name, 4, m, v, costs, np.array([0.125]))[0]
    assert lasts == pytest.approx(lasts_exactly(name, 4, m, v, costs, 0.125), rel=1e-12)


def test_several_sets_of_costs_are_played_at_once():
    one = costs_of(np.ones((3, 4)))
    both = {kind: np.concatenate([values, 2 * values]) for kind, values in one.items()}
    lasts = fast_simulation.makespans("1f1b", 4, 8, 1, both, np.zeros(2))
    assert lasts.tolist() == [33.0, 66.0]
