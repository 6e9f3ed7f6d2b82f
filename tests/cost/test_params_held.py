"""Parameters on a rank: the parts of all ranks add up to the model, whatever its kind."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operators import describe
from phalanx.core.run import Recipe
from phalanx.cost.holdings import holdings
from phalanx.cost.params import Sharers, copies, expert_tp, is_apart, unit_sizes
from phalanx.cost.table import Table

MODELS = [load.model(n) for n in ("llama-3-8b", "gpt2", "mixtral-8x7b", "deepseek-v2", "qwen3-4b")]


def held_by(shape: ModelShape, layout: Layout, pp_rank: int = 0, tp_index: int = 0) -> Sharers:
    """Parameters of a rank: what it shares with all, and those of its experts."""
    table, counts = Table.of(shape, Recipe(), [layout]), [0, 0]
    held = holdings(table, pp_rank)
    for size in unit_sizes(table, describe(shape), tp_index):
        there = np.where(is_apart(held, size), held.count(size.unit), 0)
        counts[size.experts] += int((size.params * there).item())
    return Sharers(*counts)


@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
@given(pp=st.sampled_from([1, 2, 4]))
def test_the_stages_of_a_pipeline_add_up_to_the_model(shape: ModelShape, pp: int):
    total = sum(sum(held_by(shape, Layout(pp=pp), rank)) for rank in range(pp))
    copied = shape.vocab * shape.hidden if shape.tied and pp > 1 else 0
    assert total == shape.params() + copied


@pytest.mark.parametrize(("name", "v", "copies"), [("zb-v", 2, 1), ("dualpipe", 1, 2)])
def test_a_folded_pipeline_holds_the_model_once_and_dualpipe_twice(name: str, v: int, copies: int):
    shape = load.model("llama-3-8b")
    layout = Layout(pp=4, v=v, schedule=name)
    total = sum(sum(held_by(shape, layout, rank)) for rank in range(4))
    assert total == copies * shape.params()


@given(st.sampled_from([2, 3, 4, 8]))
def test_ranks_along_tp_hold_every_matrix_once_and_the_first_the_most(tp: int):
    shape = ModelShape(heads=24, hidden=96, kv_heads=24, ffn=130, vocab=97)
    held = [sum(held_by(shape, Layout(tp=tp), tp_index=index)) for index in range(tp)]
    whole = shape.hidden * (2 * shape.layers + 1)  # norms, on every rank
    assert sum(held) == shape.params() + (tp - 1) * whole
    assert held[0] == max(held)


@given(st.sampled_from([1, 2, 4, 8]))
def test_ranks_along_ep_hold_all_experts_between_them(ep: int):
    shape = load.model("mixtral-8x7b")
    held = held_by(shape, Layout(dp=8, ep=ep))
    assert held.shared + ep * held.experts == shape.params()


def test_experts_are_cut_over_tp_unless_ep_takes_those_ranks():
    shape = load.model("moonlight-16b-a3b")
    inside, beyond = Layout(tp=2, dp=4, ep=4), Layout(tp=2, dp=4, ep=8)
    assert (expert_tp(inside), expert_tp(beyond)) == (2, 1)
    assert held_by(shape, inside).experts == held_by(shape, beyond).experts


def test_state_of_experts_spreads_over_fewer_ranks():
    assert copies(Layout(dp=64, ep=16)) == (64, 4)
    assert copies(Layout(tp=2, dp=4, ep=8)) == (4, 1)
    assert copies(Layout(dp=8, shard=4)) == (4, 4)
    assert copies(Layout(dp=4, cp=2)) == (8, 8)
