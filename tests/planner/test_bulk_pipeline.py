"""The closed formulas of pipelines, held against the schedules themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.core.errors import RefusedError
from phalanx.core.schedule import Kind
from phalanx.planner.bulk_pipeline import Pipes, Seconds, held, makespans, ranks_of
from phalanx.planner.candidates import SEARCHED, Variant
from phalanx.planner.pace import in_flight
from phalanx.planner.pace import makespans as played
from phalanx.schedules.build import build

FOLDED = ("zb-v", "dualpipev")
EVEN_PASSES = st.tuples(st.floats(0.7, 2.5), st.floats(0.3, 1.1))  # I and W, where F is 1


def variant_of(name: str, p: int, v: int) -> Variant:
    if name == "interleaved":
        return Variant(name, p, v)
    return Variant(name, p, 2 if name in FOLDED else 1)


def both(variant: Variant, m: int, costs: np.ndarray, hop: float) -> tuple[float, float]:
    """Seconds by the formula and by playing; costs are of one copy, of shape (stages, passes)."""
    name, p, v = variant
    layout_stages = build(name, p, m, v if name == "interleaved" else None).num_stages
    table = np.concatenate([costs] * (layout_stages // len(costs)))[None]
    F, I, W = (table[:, :, i] for i in range(3))  # noqa: E741  # the letters of the legend
    kinds = {Kind.FORWARD: F, Kind.BACKWARD: I + W, Kind.INPUT_GRAD: I, Kind.WEIGHT_GRAD: W}
    exact = played(name, p, m, v if name == "interleaved" else None, kinds, np.array([hop]))
    shape = load.model("llama-3-8b")
    ranks = build(name, p, m, v if name == "interleaved" else None).ranks
    copies = layout_stages // len(costs)
    worst = max(
        sum(costs[s % len(costs)].sum() for s, owner in enumerate(ranks) if owner == rank) / copies
        for rank in range(p)
    )
    assert ranks_of(shape, [variant]).copies[0] == copies
    one = np.ones((1, 1))
    pipes = Pipes(
        p=p * one,
        m=m * one,
        v=v * one,
        passes=Seconds(*(costs[:, i].mean() * one for i in range(3))),
        worst=worst * one,
        total=costs.sum() * one,
        hop=hop * one,
    )
    return float(makespans(pipes, [variant], np.array([0]))[0, 0]), float(exact[0])


def refuses(name: str, p: int, m: int) -> bool:
    try:
        build(name, p, m, 2 if name == "interleaved" else None)
    except RefusedError:
        return True
    return False


@pytest.mark.parametrize("name", SEARCHED)
@settings(max_examples=15)
@given(p=st.sampled_from([2, 4, 6, 8]), turns=st.integers(2, 5), passes=EVEN_PASSES)
def test_with_equal_stages_a_formula_is_what_playing_the_schedule_takes(
    name: str, p: int, turns: int, passes: tuple[float, float]
):
    variant, m = variant_of(name, p, 3), p * turns
    stages = variant.num_stages if name != "dualpipe" else p
    costs = np.tile((1.0, *passes), (stages, 1))
    formula, exact = both(variant, m, costs, 0.0)
    assert formula == pytest.approx(exact, rel=0.025)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
@settings(max_examples=15)
@given(
    p=st.sampled_from([2, 4, 8]),
    turns=st.integers(1, 5),
    passes=EVEN_PASSES,
    head=st.floats(0, 0.4),
    hop=st.floats(0, 0.05),
)
def test_a_heavier_last_stage_and_slow_messages_move_it_by_little(
    name: str, p: int, turns: int, passes: tuple[float, float], head: float, hop: float
):
    costs = np.tile((1.0, *passes), (p, 1))
    costs[-1] *= 1 + head
    formula, exact = both(Variant(name, p, 1), p * turns, costs, hop)
    assert formula == pytest.approx(exact, rel=0.08)


@pytest.mark.parametrize("name", SEARCHED)
@given(p=st.sampled_from([1, 2, 3, 4, 6, 8]), m=st.integers(1, 24))
def test_what_ranks_hold_is_counted_on_the_rows(name: str, p: int, m: int):
    if refuses(name, p, m):
        return
    v = 2 if name in (*FOLDED, "interleaved") else 1
    exact = in_flight(name, p, m, 2 if name == "interleaved" else None)
    columns = (np.full(p, n) for n in (p, m, v))
    assert held(name, *columns, np.arange(p)).tolist() == list(exact)


def test_the_ranks_of_a_variant_are_told_apart_by_their_blocks():
    shape = load.model("llama-3.1-405b")  # 126 blocks: 14 of 16 ranks hold 8, the ends 7
    ranks = ranks_of(shape, [Variant("1f1b", 16, 1)])
    assert ranks.dense.tolist() == [[7, 7, 8]]
    assert ranks.place.tolist() == [[0, 15, 1]]  # of all with 8, the one that holds most in flight
    assert ranks.last.tolist() == [[0, 1, 0]]


def test_dualpipe_holds_two_stages_and_each_end_of_the_model_on_one_rank():
    ranks = ranks_of(load.model("llama-3-8b"), [Variant("dualpipe", 4, 1)])
    assert ranks.copies.tolist() == [2]
    assert ranks.dense[0, 0] == 16
    assert ranks.last[0, 0] == 1
