import pytest

from phalanx.core.layout import Layout
from phalanx.core.schedule import Schedule
from phalanx.schedules.build import build, lowered
from phalanx.schedules.layouts import num_stages, placement
from phalanx.schedules.lower import ACCUMULATES
from phalanx.schedules.placement import placement_of
from phalanx.schedules.registry import SPECS


def schedule_of(line: str, m: int) -> Schedule:
    return lowered(Layout.parse(line), m, reduce_every=False)


@pytest.mark.parametrize(
    "line",
    [
        "pp=4",
        "pp=1 schedule=zb-v",
        "pp=3 schedule=gpipe",
        "pp=3 v=2 schedule=interleaved",
        "pp=4 schedule=zb-v",
        "pp=3 schedule=dualpipev",
        "pp=4 schedule=dualpipe",
    ],
)
def test_a_layout_places_its_stages_as_its_schedule_does(line: str) -> None:
    layout = Layout.parse(line)
    assert placement(layout) == placement_of(schedule_of(line, 4 * layout.pp))
    assert placement(layout).depth == num_stages(layout)


def test_slices_of_a_rank_by_placement() -> None:
    slices = {
        line: placement(Layout.parse(f"pp=4 {line}")).slices_of(1)
        for line in ("v=2 schedule=interleaved", "schedule=zb-v", "schedule=dualpipe")
    }
    assert list(slices.values()) == [(1, 5), (1, 6), (1, 2)]


def test_ends_meet_on_one_rank_in_a_v_and_when_the_model_is_there_twice() -> None:
    together = {
        line: placement(Layout.parse(line)).ends_together
        for line in ("pp=1", "pp=2", "pp=2 schedule=zb-v", "pp=4 schedule=dualpipe")
    }
    assert list(together.values()) == [True, False, True, True]


def test_a_tensor_crosses_only_between_neighbouring_stages_of_one_copy() -> None:
    fold = placement(Layout.parse("pp=2 schedule=zb-v"))
    assert [fold.crosses(stage, 1) for stage in range(4)] == [True, False, True, False]
    twice = placement(Layout.parse("pp=2 schedule=dualpipe"))
    assert [twice.crosses(stage, 1) for stage in range(4)] == [True, False, True, False]
    assert [twice.crosses(stage, -1) for stage in range(4)] == [False, True, False, True]


MEETING = [spec.name for spec in SPECS if spec.placement(2, spec.chunks.least).ends_together]


@pytest.mark.parametrize("name", MEETING)
@pytest.mark.parametrize("p", [2, 4, 6])
def test_where_ends_meet_the_stage_that_embeds_finishes_last(name: str, p: int) -> None:
    """So a table that both share is reduced with the embedding: nothing follows."""
    for m in (2 * p, 2 * p + 2, 5 * p):
        schedule = build(name, p, m)
        for row in schedule.rows:
            last = {a.stage % schedule.depth: n for n, a in enumerate(row) if a.kind in ACCUMULATES}
            if last.keys() >= {0, schedule.depth - 1}:
                assert last[0] > last[schedule.depth - 1]
