"""What a drill does follows from the run and the seed, and names only what exists."""

from dataclasses import replace
from itertools import pairwise

import pytest

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.run import Recipe, Run
from phalanx.drills.campaign import drilled
from phalanx.drills.injuries import KINDS, injuries
from phalanx.trainer.faults import POINTS

RUN = drilled(replace(Run(), layout=Layout.parse("dp=4")), 12)


def test_every_named_point_is_killed_at() -> None:
    killed = {fault.point for injury in injuries(RUN, ["kill"], 0, 0) for fault in injury.plan}
    assert killed == set(POINTS)


def test_the_first_and_the_last_rank_are_killed() -> None:
    assert {injury.rank for injury in injuries(RUN, ["kill"], 0, 0)} == {0, 3}


def test_a_seed_draws_the_same_and_another_seed_something_else() -> None:
    drawn = [injuries(RUN, ["random"], 30, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sum(len(injury.kills) for injury in drawn[0]) == 30
    assert len({where for injury in drawn[0] for where in injury.kills}) > 20


def test_a_long_run_is_killed_many_times_in_a_row_and_gets_on_in_between() -> None:
    run = drilled(replace(Run(), layout=Layout.parse("dp=4"), recipe=Recipe(steps=100)), 100)
    for injury in injuries(run, ["random"], 250, 0):
        assert [fault.attempt for fault in injury.plan] == list(range(25))
        points = [fault.point for fault in injury.plan]
        assert ("start", "start") not in pairwise(points)
        saved = [
            f.after > run.recipe.checkpoint_every for f in injury.plan if f.attempt and f.after
        ]
        assert all(saved)


def test_all_kinds_are_done_where_none_is_named() -> None:
    assert {injury.kind for injury in injuries(RUN, [], 1, 0)} == set(KINDS)


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean preempt"):
        injuries(RUN, ["premept"], 1, 0)


def test_a_run_for_many_ranks_is_refused_with_a_layout_that_works() -> None:
    with pytest.raises(RefusedError, match="such as dp=4"):
        drilled(replace(Run(), layout=Layout.parse("dp=8")), 12)


def test_a_drilled_run_saves_and_validates_and_keeps_its_learning_rate() -> None:
    recipe = RUN.recipe
    assert (recipe.last_step, recipe.checkpoint_every, recipe.evaluate_every) == (12, 3, 6)
    assert recipe.steps == Run().recipe.steps
