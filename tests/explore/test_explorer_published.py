"""Published runs on the page: chosen by a rule, predicted by the planner, and ready to load."""

import runpy
from pathlib import Path

import pytest

from phalanx.explore.asked import cluster_of, layout_of, shape_of
from phalanx.explore.board import Board
from phalanx.explore.live import after_set
from phalanx.explore.panels.published import Preset, presets
from phalanx.explore.presets import facts_of
from phalanx.explore.state import Reading, State

TOOL = Path(__file__).parents[2] / "tools" / "presets.py"
EACH = pytest.mark.parametrize("preset", presets(), ids=lambda one: one.run.id)


def test_what_is_packed_are_the_smallest_and_the_largest_run_of_each_source():
    tool = runpy.run_path(str(TOOL))
    assert tool["TARGET"].read_text(encoding="utf-8") == tool["chosen"](), "python tools/presets.py"


@EACH
def test_a_published_run_can_be_loaded(preset: Preset):
    state = after_set(State(), preset.loads)
    assert state.problems == ()
    reading = Reading(state)
    run, layout = preset.run, layout_of(Reading(state))
    assert facts_of(shape_of(reading)) == facts_of(run.shape)
    mine, its = cluster_of(reading).accelerator, run.cluster.accelerator
    assert its.name.startswith(mine.name.removesuffix("-changed"))
    assert mine.memory == its.memory
    wanted = run.layouts[0]
    for key in ("dp", "pp", "tp", "cp", "ep", "zero", "mb", "schedule", "recompute", "stages"):
        assert getattr(layout, key) == getattr(wanted, key), key
    assert reading.number("B") == run.batch * run.seq


def test_the_table_says_what_was_measured_and_what_is_predicted_now():
    shown = Board().shown(State(), ["published"])
    table = shown.pictures["pub.table"].svg
    for preset in presets():
        assert f"{preset.run.cluster.count:,}</a>" in table
    worst = max(abs(one.found.time_error or 0.0) for one in presets())
    assert shown.records["pub.worst"].value == worst
