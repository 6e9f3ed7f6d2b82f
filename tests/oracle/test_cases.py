from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError, RefusedError
from phalanx.core.layout import Layout
from phalanx.cost.refusals import refuse
from phalanx.oracle.cases import (
    DRAWN,
    CaseSpec,
    covering_set,
    merged,
    read_case,
    sample,
    write_case,
)
from phalanx.oracle.covering import features_of
from phalanx.schedules.layouts import chunks
from phalanx.schedules.registry import SPECS

PROVABLE = {spec.name for spec in SPECS if not spec.asynchronous}
SEEDS = st.integers(0, 10_000)


def tags(spec: CaseSpec) -> set[str]:
    """Everything that a case has, and which axes it cuts."""
    layout = Layout.parse(spec.layout)
    axes = {axis for axis in ("dp", "pp", "tp", "cp", "ep") if getattr(layout, axis) > 1}
    masks = {spec.masked} | ({"v"} if chunks(layout) > 1 else set())
    return features_of(spec) | axes | masks


def test_every_case_of_the_covering_set_can_be_run() -> None:
    for spec in covering_set():
        refuse(spec.case().run)


@pytest.mark.parametrize("limit", [1, 2, 4, 8])
def test_the_covering_set_keeps_to_the_ranks_there_are(limit: int) -> None:
    sizes = [Layout.parse(spec.layout).ranks for spec in covering_set(limit)]
    assert sizes
    assert max(sizes) == limit


@settings(max_examples=20)
@given(SEEDS)
def test_a_case_is_read_as_it_was_written(seed: int) -> None:
    for spec in sample(2, 8, seed):
        assert read_case(write_case(spec)) == spec


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 9))
def test_what_is_drawn_can_be_run(seed: int, max_ranks: int) -> None:
    for spec in sample(3, max_ranks, seed):
        run = spec.case().run
        refuse(run)
        assert run.layout.ranks <= max_ranks


@settings(max_examples=15)
@given(SEEDS)
def test_the_same_seed_draws_the_same_cases(seed: int) -> None:
    assert sample(4, 8, seed) == sample(4, 8, seed)
    assert sample(4, 8, seed)[:2] == sample(2, 8, seed)


def test_a_sample_meets_every_feature_often_enough() -> None:
    specs = sample(400, 8, 1)
    counts = Counter(tag for spec in specs for tag in tags(spec))
    layouts = ["dp", "pp", "tp", "ep", "zero=0", "zero=1", "zero=2", "zero=3", "shard", "copies"]
    context = ["cp", "ring", "gather", "ulysses"]
    others = ["mb", "none", "recompute core", "recompute all", "stages", "sp=off", "v"]
    masks = ["uneven", "holes", "documents"]
    special = {"stochastic", "wide"}  # only in bf16, and only with scales of blocks
    wanted = [*layouts, *context, *others, *masks, *PROVABLE, *set(DRAWN) - special]
    seldom = [tag for tag in wanted if counts[tag] < 8]
    assert seldom == []
    assert len({spec.layout for spec in specs}) > 300


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([64, 97, 128]))
def test_what_is_set_stands_over_what_was_drawn(seed: int, vocab: int) -> None:
    for spec in sample(3, 4, seed, {"model": {"vocab": vocab}}):
        assert spec.case().run.model.vocab == vocab


def test_a_sample_with_which_no_layout_goes_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"hardly any layout goes with what is set: .*layers"):
        sample(3, 4, 1, {"model": {"layers": 0}})


def test_a_layout_key_that_is_set_changes_the_layout() -> None:
    spec = CaseSpec("dp=2 zero=3", tables={"layout": {"precision": "fp32", "zero": 1}})
    assert spec.case().run.layout == Layout(dp=2, zero=1, precision="fp32")


def test_a_key_that_no_model_has_is_named() -> None:
    with pytest.raises(PhalanxError, match="lyers"):
        CaseSpec("dp=1", tables={"model": {"lyers": 3}}).case()


def test_tables_are_laid_over_each_other_the_last_on_top() -> None:
    first, second = {"model": {"layers": 2, "vocab": 9}}, {"model": {"layers": 3}, "recipe": {}}
    assert merged([first, second]) == {"model": {"layers": 3, "vocab": 9}, "recipe": {}}
    assert first == {"model": {"layers": 2, "vocab": 9}}


def test_a_case_tells_what_is_unusual_about_it() -> None:
    spec = CaseSpec("dp=2", ("tied", "odd"), masked="holes", documents=True)
    assert spec.unusual == "tied odd documents masked=holes"
    assert CaseSpec("dp=2").unusual == ""
