"""The covering set, and a few layouts drawn anew each time, take the steps of one device."""

import secrets

import pytest

from phalanx.oracle.cases import CaseSpec, covering_set, sample
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import verify

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("spec", covering_set(), ids=lambda q: f"{q.layout} {q.unusual}".strip())
def test_the_layout_takes_the_steps_of_one_device(ranks: RankPool, spec: CaseSpec) -> None:
    assert verify(ranks, spec.case()).complaints == []


def test_layouts_drawn_at_random_take_the_steps_of_one_device(ranks: RankPool) -> None:
    seed = secrets.randbelow(1_000_000)
    for spec in sample(6, 8, seed):
        complaints = verify(ranks, spec.case()).complaints
        assert complaints == [], f"phalanx verify --sample 6 --seed {seed}: {spec.layout}"
