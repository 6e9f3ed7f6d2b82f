"""A covering set gets cheaper and loses no pair."""

from random import Random

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.oracle.cases import CaseSpec, altered, covering_set
from phalanx.oracle.cheaper import cheaper
from phalanx.oracle.covering import Pair, candidates, cost, pairs_of


def met(specs: list[CaseSpec]) -> set[Pair]:
    return set().union(*map(pairs_of, specs))


def test_the_same_pairs_meet_for_less() -> None:
    first, *drawn = candidates(8, seed=3, max_ranks=2)
    found = cheaper(drawn, 1, [first], seed=3)
    assert met([first, *found]) >= met([first, *drawn])
    assert sum(map(cost, found)) < sum(map(cost, drawn))
    assert max(Layout.parse(spec.layout).ranks for spec in found) <= 2


def test_no_case_of_a_cheaper_set_could_be_left_out() -> None:
    drawn = candidates(12, seed=4, max_ranks=2)
    found = cheaper([*drawn, *drawn], 0)
    assert len(found) <= len(drawn)
    for spec in found:
        assert met([other for other in found if other is not spec]) < met(found)


def test_an_altered_case_differs_in_a_few_words() -> None:
    random, spec = Random(5), covering_set()[40]
    words, found = set(spec.layout.split()), 0
    for _ in range(40):
        try:
            other = altered(random, spec, 8)
        except PhalanxError:
            continue
        found += 1
        assert len(words - {*other.layout.split(), "stages"}) <= 4
        assert len({*spec.features} ^ {*other.features}) <= 6
    assert found > 10
