"""The covering set lets every feature meet every size of every axis that it can be drawn with."""

import pytest

from phalanx.oracle.cases import FEATURES, ROUTED, CaseSpec, covering_set
from phalanx.oracle.covering import MEETINGS, candidates, choose, features_of, pairs_of

AGAIN = "run tools/covering_set.py"


def met() -> set[tuple[str, str]]:
    return set().union(*(pairs_of(spec) for spec in covering_set()))


def test_what_is_drawn_meets_nothing_that_does_not_meet_in_the_covering_set() -> None:
    drawn = set().union(*(pairs_of(spec) for spec in candidates(120, seed=1)))
    assert sorted(drawn - met()) == [], AGAIN


def test_every_feature_is_in_the_covering_set() -> None:
    assert set(FEATURES) <= set().union(*(features_of(spec) for spec in covering_set())), AGAIN


def test_all_that_meets_in_the_code_meets() -> None:
    assert sorted(MEETINGS - met()) == [], AGAIN


@pytest.mark.parametrize("feature", ROUTED)
def test_experts_meet_nothing_where_no_layer_has_any(feature: str) -> None:
    dense = {"model": {"layers": 2, "dense_layers": 2}}
    assert feature in features_of(CaseSpec("dp=2", (feature,)))
    assert feature not in features_of(CaseSpec("dp=2", (feature,), tables=dense))


@pytest.mark.parametrize("axis", ["dp", "pp", "tp", "cp"])
@pytest.mark.parametrize("feature", ["tied", "odd", "gpt", "dropout", "experts", "deepseek", "mha"])
def test_what_every_layout_can_have_meets_every_size(feature: str, axis: str) -> None:
    assert {(feature, f"{axis}={size}") for size in (1, 2, 3, 4)} <= met(), AGAIN


@pytest.mark.parametrize(
    ("feature", "sizes"),
    [
        ("gather", ["cp=2", "cp=3", "cp=4"]),
        ("ring", ["cp=2", "cp=3", "cp=4"]),
        ("ulysses", ["cp=2", "cp=3", "cp=4"]),
        ("interleaved", ["v=2", "v=3", "v=4"]),
        ("shard", ["dp=4", "ep=2"]),
        ("experts in 16 bits", ["dp=2", "dp=3", "pp=2", "tp=2", "cp=2", "cp=3", "ep=2", "ep=3"]),
        ("several padded", ["tp=2", "tp=3", "tp=4", "cp=2", "cp=3", "cp=4"]),
        ("short last chunk", ["tp=1", "tp=2", "cp=2", "cp=3", "pp=2"]),
        ("experts", ["ep=2", "ep=3"]),
        ("deepseek", ["ep=2", "ep=3", "ep=4"]),
        ("copies of experts", ["dp=4", "ep=2"]),
        ("zero=3", ["dp=2", "dp=3", "dp=4", "cp=3", "ep=3"]),
    ],
)
def test_what_needs_an_axis_meets_its_sizes(feature: str, sizes: list[str]) -> None:
    assert {(feature, size) for size in sizes} <= met(), AGAIN


def test_a_case_that_adds_nothing_is_not_chosen() -> None:
    drawn = candidates(12, seed=2)
    chosen = choose([*drawn, *drawn])
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, drawn))
    assert len(chosen) == len({str(spec) for spec in chosen}) <= len(drawn)
