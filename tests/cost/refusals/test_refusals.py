"""What cannot be is a value: asked of a table or of one run, the answer is the same."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError, RefusedError
from phalanx.core.layout import CONTEXTS, Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.cost.refusals import refusal, refuse, refused, rules
from phalanx.cost.table import Table
from phalanx.schedules.registry import NAMES

DENSE = ModelShape(layers=4, hidden=64, heads=8, kv_heads=2, vocab=96, ffn=96)
ROUTED = replace(DENSE, experts=6, top_k=2, moe_ffn=40)
LATENT = ModelShape(
    layers=4, hidden=64, heads=8, vocab=96, kv_lora_rank=16, qk_nope=8, qk_rope=8, v_head=8
)
RECIPE = Recipe(seq=48, batch=24)
KEYS = frozenset(field.name for field in fields(Layout))

layouts = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([2, 4]),
        "pp": st.sampled_from([1, 2, 3]),
        "tp": st.sampled_from([1, 2, 3, 8]),
        "cp": st.sampled_from([1, 2, 3]),
        "ep": st.sampled_from([1, 1, 2, 4]),
        "zero": st.integers(0, 3),
        "shard": st.sampled_from([0, 1, 2]),
        "v": st.sampled_from([0, 0, 2]),
        "schedule": st.sampled_from(NAMES),
        "mb": st.sampled_from([1, 3, 5]),
        "stages": st.sampled_from([(), (), (3, 1), (0, 4)]),
        "recompute": st.sampled_from(["none", "full", "norms", "latent"]),
        "offload": st.sampled_from(["none", "activations", "nvme"]),
        "reshard": st.booleans(),
        "logits": st.sampled_from([0, 16]),
        "sp": st.sampled_from([None, False]),
        "compile": st.booleans(),
        "optimistic": st.booleans(),
        "context": st.sampled_from(CONTEXTS),
    }
).map(lambda values: Layout(**values))
precisions = st.sampled_from(["bf16", "fp16", "fp8", "mxfp8"])


@given(
    st.lists(layouts, min_size=1, max_size=5),
    precisions,
    st.sampled_from([DENSE, ROUTED, LATENT]),
    st.booleans(),
)
def test_a_row_of_a_table_is_refused_where_its_layout_is_and_for_the_same_reason(
    rows: list[Layout], precision: str, model: ModelShape, ours: bool
) -> None:
    rows = [replace(layout, precision=precision) for layout in rows]
    table = Table.of(model, RECIPE, rows)
    found: list[str | None] = [None] * len(rows)
    for reason, clashes in refused(table, frozenset(), KEYS, ours=ours):
        found = [known or (reason if clashes[i] else None) for i, known in enumerate(found)]
    alone = [refusal(Run(model=model, layout=x, recipe=RECIPE), ours=ours) for x in rows]
    assert found == [one and one.reason for one in alone]


@given(layouts, precisions, st.sampled_from([DENSE, ROUTED, LATENT]))
def test_a_refusal_names_numbers_and_ends_with_what_works(
    layout: Layout, precision: str, model: ModelShape
) -> None:
    run = Run(model=model, layout=replace(layout, precision=precision), recipe=RECIPE)
    found = refusal(run)
    if found is None:
        refuse(run)
        return
    words = ("use ", "can be ", "must divide", "needs a block", "other frameworks", "for example")
    assert any(word in found.message for word in words), found.message
    with pytest.raises(RefusedError) as error:
        refuse(run)
    assert str(error.value) == found.message


def test_rules_are_asked_once_as_soon_as_their_keys_are_settled() -> None:
    table = Table.of(DENSE, RECIPE, [Layout(tp=3, recompute="latent")])
    first = dict(refused(table, frozenset(), frozenset({"dp", "pp", "tp", "cp", "mb"})))
    settled = frozenset({"dp", "pp", "tp", "cp", "mb"})
    later = dict(refused(table, settled, frozenset({"recompute"})))
    assert first["tp does not divide the heads"].tolist() == [True]
    assert later["the trainer does not recompute such parts"].tolist() == [True]
    assert not first.keys() & later.keys()


def test_every_rule_reads_only_keys_that_it_names() -> None:
    table = Table.of(ROUTED, RECIPE, [Layout(dp=2)])
    resolved = {"shard": "shards"}
    for rule in rules() + rules(ours=False):
        missing = KEYS - rule.keys - {"precision"}
        some = replace(table, **{resolved.get(key, key): None for key in missing - {"tp"}})
        assert rule.clashes(some).shape == (1,), rule.reason


@pytest.mark.parametrize(
    ("layout", "model", "ours", "says"),
    [
        ("tp=3", DENSE, True, "tp can be 1, 2, 4, 8"),
        ("tp=3", DENSE, False, "tp can be 1, 2, 4, 8"),
        ("dp=2 cp=5", DENSE, False, "cp can be 1, 2, 3, 4, 6"),
        ("cp=2 context=ulysses tp=4", DENSE, True, "cp can be 1, or use context=ring"),
        ("dp=2 ep=2", DENSE, True, "use ep=1"),
        ("dp=2 ep=4", ROUTED, True, "ep can be 1, 2"),
        ("dp=1 tp=2 ep=2", ROUTED, True, "ep can be 1"),
        ("dp=1 tp=4 ep=4", ROUTED, False, "ep can be 1, 2, 3, 6"),
        ("mb=5", DENSE, True, "the batch can be 20 or 25"),
        ("pp=3 schedule=dualpipe", DENSE, True, "pp=2 or 4"),
        ("pp=5", DENSE, True, "pp x v can be at most 4"),
        ("zero=2 reshard=off dp=2", DENSE, True, "use zero=3, or reshard=on"),
    ],
)
def test_what_clashes_is_said_with_the_nearest_that_works(
    layout: str, model: ModelShape, ours: bool, says: str
) -> None:
    found = refusal(Run(model=model, layout=Layout.parse(layout), recipe=RECIPE), ours=ours)
    assert found is not None
    assert says in found.message


def test_experts_over_tensor_ranks_are_for_programs_that_lend_them() -> None:
    run = Run(model=ROUTED, layout=Layout(tp=2, ep=2), recipe=RECIPE)
    assert refusal(run, ours=False) is None
    assert refusal(run, ours=True) is not None


def test_an_unknown_schedule_is_wrong_usage_and_not_a_refusal() -> None:
    run = Run(model=DENSE, layout=Layout(schedule="fifo"), recipe=RECIPE)
    with pytest.raises(PhalanxError, match="unknown schedule"):
        refusal(run)


def test_a_table_without_rows_is_refused_nothing() -> None:
    table = Table.of(DENSE, RECIPE, [Layout(schedule="zb-v")]).take(np.zeros(0, dtype=np.int64))
    assert all(clashes.shape == (0,) for _, clashes in refused(table, frozenset(), KEYS))


def test_chunks_that_a_schedule_does_not_take_lead_to_one_that_does() -> None:
    found = refusal(Run(model=DENSE, layout=Layout(pp=2, v=2), recipe=RECIPE))
    assert found is not None
    assert "use v=1, or schedule=interleaved" in found.message
