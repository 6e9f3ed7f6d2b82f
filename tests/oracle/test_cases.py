from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError, RefusedError
from phalanx.core.layout import Layout
from phalanx.cost.refusals import refuse
from phalanx.oracle.cases import (
    COVERING_SET,
    DRAWN,
    FEATURES,
    CaseSpec,
    covering_set,
    merged,
    sample,
)
from phalanx.schedules.layouts import chunks

SEEDS = st.integers(0, 10_000)

# What meets somewhere in the code: a bug may need both.
MEET = """
    dp tied, pp tied, v tied, zero=3 tied, tp tied, shard tied, full tied
    dp odd, tp odd, pp odd, shard odd, zero=3 odd
    dp gpt, tp gpt, pp gpt, v gpt, shard gpt, zero=3 gpt, sp=off gpt, full gpt
    tp qk-norm, sp=off qk-norm, dp qk-norm, full qk-norm, selective qk-norm, gpt qk-norm
    tp mqa, sp=off mqa, dp mqa, pp mqa, zero=3 mqa, full mqa, qk-norm mqa, gpt mqa
    tp latent, sp=off latent, dp latent, pp latent, full latent, selective latent, odd latent
    tp direct-query, pp direct-query, full direct-query, latent documents, zero=3 latent
    tp dropout, sp=off dropout, dp dropout, pp dropout, full dropout, v dropout, odd dropout
    tp smoothing, sp=off smoothing, dp smoothing, odd smoothing
    pp max-norm, tp max-norm, shard max-norm, zero=3 max-norm
    dp holes, tp holes, pp holes, shard holes, zero=3 holes
    dp documents, tp documents, pp documents, odd documents, full documents, gpt documents
    dp tp, dp pp, pp tp, shard tp, v tp, v dp, zero=0 tp, zero=2 tp, zero=3 tp
    zero=1 pp, zero=2 pp, zero=3 pp, zero=2 v, zero=3 v, zero=3 full, full tp, full pp, full v
    selective tp, selective dp, selective v, gpipe dp, stages pp, stages tp, stages tied
    cp odd, cp tied, cp dropout, cp documents, cp holes, cp gpt, cp smoothing, cp qk-norm
    cp tp, cp dp, cp pp, cp v, cp zb-h1, cp copies, cp sp=off, cp full, cp selective, cp max-norm
    cp mha, cp latent, cp zero=0, cp zero=1, cp zero=2, cp zero=3, ulysses odd
    gather documents, ulysses documents
    copies tp, copies tied, copies full, zero=0 mb, zero=3 mb, v mb, tp mb, shard mb
"""


def tags(spec: CaseSpec) -> set[str]:
    """Everything that a case has."""
    layout = Layout.parse(spec.layout)
    found = {axis for axis in ("dp", "pp", "tp", "cp") if getattr(layout, axis) > 1}
    found |= {spec.masked, layout.schedule, str(layout.recompute), *spec.features}
    found |= {f"zero={layout.zero}"} if layout.sharers > 1 else set()
    found |= {layout.context} if layout.cp > 1 else set()
    conditions = {
        "shard": 1 < layout.shards < layout.dp,
        "copies": layout.shards == 1 < layout.dp,
        "v": chunks(layout) > 1,
        "mb": layout.mb > 1,
        "sp=off": layout.tp > 1 and not layout.sequence_parallel,
        "stages": bool(layout.stages),
        "documents": spec.documents,
    }
    return found | {name for name, holds in conditions.items() if holds}


def test_the_covering_set_lets_all_that_meets_meet() -> None:
    met = {frozenset(pair) for q in COVERING_SET for pair in combinations(sorted(tags(q)), 2)}
    wanted = [frozenset(pair.split()) for line in MEET.split("\n") for pair in line.split(",")]
    assert [sorted(pair) for pair in wanted if len(pair) == 2 and pair not in met] == []


def test_every_feature_is_in_the_covering_set() -> None:
    assert set(FEATURES) <= {name for spec in COVERING_SET for name in spec.features}


def test_every_case_of_the_covering_set_can_be_run() -> None:
    for spec in COVERING_SET:
        refuse(spec.case().run)


@pytest.mark.parametrize("limit", [1, 2, 4, 8])
def test_the_covering_set_keeps_to_the_ranks_there_are(limit: int) -> None:
    sizes = [Layout.parse(spec.layout).ranks for spec in covering_set(limit)]
    assert sizes
    assert max(sizes) == limit


@given(SEEDS, st.integers(1, 9))
def test_what_is_drawn_can_be_run(seed: int, max_ranks: int) -> None:
    for spec in sample(3, max_ranks, seed):
        run = spec.case().run
        refuse(run)
        assert run.layout.ranks <= max_ranks


@given(SEEDS)
def test_the_same_seed_draws_the_same_cases(seed: int) -> None:
    assert sample(4, 8, seed) == sample(4, 8, seed)
    assert sample(4, 8, seed)[:2] == sample(2, 8, seed)


def test_a_sample_meets_every_feature_often_enough() -> None:
    specs = sample(400, 8, 1)
    counts = Counter(tag for spec in specs for tag in tags(spec))
    layouts = ["dp", "pp", "tp", "zero=0", "zero=1", "zero=2", "zero=3", "shard", "copies", "v"]
    context = ["cp", "ring", "gather", "ulysses"]
    others = ["gpipe", "1f1b", "interleaved", "mb", "none", "selective", "full", "stages", "sp=off"]
    masks = ["uneven", "holes", "documents"]
    seldom = [tag for tag in [*layouts, *context, *others, *masks, *DRAWN] if counts[tag] < 12]
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
