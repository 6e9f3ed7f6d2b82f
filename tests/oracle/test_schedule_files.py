"""A schedule drawn by hand, in a file, takes the steps of one device."""

from pathlib import Path

import pytest

from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import verify
from phalanx.schedules.build import build
from phalanx.schedules.text import to_csv

pytestmark = pytest.mark.ranks

# Stages 0 and 3 on rank 0; the last micro-batch goes first, and weights wait as long as they can.
BY_HAND = """
0F1,0F0,3F1,3I1,3F0,3I0,0I1,0I0,3W0,3W1,0W1,0W0
1F1,2F1,1F0,2F0,2I1,1I1,2B0,1I0,1W0,2W1,1W1
""".strip()


@pytest.mark.parametrize("features", [(), ("tied",)])
@pytest.mark.parametrize("layout", ["", "dp=2 zero=3 recompute=full"])
def test_rows_drawn_by_hand_take_the_steps_of_one_device(
    ranks: RankPool, tmp_path: Path, layout: str, features: tuple[str, ...]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(BY_HAND)
    case = CaseSpec(f"{layout} pp=2 v=2 schedule={path}", features).case()
    assert verify(ranks, case).complaints == []


def test_a_written_dualpipe_takes_the_steps_of_one_device(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "both-ways.csv"
    path.write_text(to_csv(build("dualpipe", 2, 4)))
    assert verify(ranks, CaseSpec(f"pp=2 schedule={path}").case()).complaints == []
