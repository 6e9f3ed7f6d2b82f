"""Parameters on a rank: the parts of all ranks add up to the model, whatever its kind."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operators import describe
from phalanx.core.run import Recipe
from phalanx.cost.holdings import holdings
from phalanx.cost.params import (
    Held,
    block_held,
    copies,
    expert_tp,
    is_apart,
    rank_held,
    stages_of_rank,
    unit_sizes,
)
from phalanx.cost.table import Table
from phalanx.schedules.build import build

MODELS = [load.model(n) for n in ("llama-3-8b", "gpt2", "mixtral-8x7b", "deepseek-v2", "qwen3-4b")]


@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
@given(pp=st.sampled_from([1, 2, 4]))
def test_the_stages_of_a_pipeline_add_up_to_the_model(shape: ModelShape, pp: int):
    layout = Layout(pp=pp)
    total = sum(rank_held(shape, layout, rank).total for rank in range(pp))
    copied = shape.vocab * shape.hidden if shape.tied and pp > 1 else 0
    assert total == shape.params() + copied


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe", "dualpipev"])
def test_a_rank_holds_the_stages_that_its_schedule_places_there(name: str):
    schedule = build(name, 4, 8)
    v = schedule.v if name in ("interleaved", "zb-v", "dualpipev") else 1
    layout = Layout(pp=4, v=v, schedule=name)
    for rank in range(4):
        placed = tuple(stage % schedule.depth for stage in schedule.stages_of(rank))
        assert stages_of_rank(layout, rank) == placed


@pytest.mark.parametrize(("name", "v", "copies"), [("zb-v", 2, 1), ("dualpipe", 1, 2)])
def test_a_folded_pipeline_holds_the_model_once_and_dualpipe_twice(name: str, v: int, copies: int):
    shape = load.model("llama-3-8b")
    layout = Layout(pp=4, v=v, schedule=name)
    total = sum(rank_held(shape, layout, rank).total for rank in range(4))
    assert total == copies * shape.params()


@pytest.mark.parametrize(
    "shape",
    [
        *(load.model(name) for name in ("llama-3-8b", "gpt2", "qwen2.5-7b", "qwen3-8b")),
        replace(load.model("deepseek-v3"), experts=0),
    ],
    ids=lambda s: s.name,
)
@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 3]), sp=st.booleans())
def test_dense_ranks_hold_what_the_trainers_units_hold(
    shape: ModelShape, tp: int, pp: int, sp: bool
):
    layout = Layout(tp=tp, pp=pp, sp=sp, precision="bf16")
    table = Table.of(shape, Recipe(seq=128, batch=8), [layout])
    for rank in range(pp):
        held = holdings(table, rank)
        total = sum(
            (size.params * held.count(size.unit) * is_apart(held, size)).item()
            for size in unit_sizes(table, describe(shape))
        )
        assert rank_held(shape, layout, rank).total == total


@given(st.sampled_from([1, 2, 4, 8]))
def test_ranks_along_ep_hold_all_experts_between_them(ep: int):
    shape = load.model("mixtral-8x7b")
    layout = Layout(dp=8, ep=ep)
    held = rank_held(shape, layout, 0)
    assert held.shared + ep * held.experts == shape.params()


def test_experts_are_cut_over_tp_unless_ep_takes_those_ranks():
    shape = load.model("moonlight-16b-a3b")
    inside, beyond = Layout(tp=2, dp=4, ep=4), Layout(tp=2, dp=4, ep=8)
    assert (expert_tp(inside), expert_tp(beyond)) == (2, 1)
    last = shape.layers - 1
    assert block_held(shape, inside, last).experts == block_held(shape, beyond, last).experts


def test_state_of_experts_spreads_over_fewer_ranks():
    assert copies(Layout(dp=64, ep=16)) == Held(64, 4)
    assert copies(Layout(tp=2, dp=4, ep=8)) == Held(4, 1)
    assert copies(Layout(dp=8, shard=4)) == Held(4, 4)
    assert copies(Layout(dp=4, cp=2)) == Held(8, 8)
