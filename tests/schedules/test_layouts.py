"""What follows from a layout's schedule: how many stages, of which layers, where."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.schedules.layouts import (
    chunks,
    is_asynchronous,
    layers_of_stages,
    num_stages,
    reduces_every,
    spec_of,
)
from phalanx.schedules.registry import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_that_leaves_v_open_has_as_few_chunks_as_its_schedule_can_have(name: str) -> None:
    layout = Layout(pp=2, schedule=name)
    assert (
        spec_of(layout).build(2, 4).num_stages
        == num_stages(layout) * spec_of(layout).placement(2, chunks(layout)).copies
    )
    assert chunks(replace(layout, v=5)) == 5


def test_a_layout_keeps_what_was_asked_when_its_schedule_is_changed() -> None:
    assert chunks(replace(Layout(schedule="zb-v"), schedule="1f1b")) == 1


def test_an_unknown_schedule_is_wrong_usage_with_the_nearest_that_exists() -> None:
    with pytest.raises(UsageError, match="did you mean 1f1b"):
        chunks(Layout(schedule="1f1"))


def test_gradients_of_every_micro_batch_are_reduced_where_they_live_sharded_or_move_weights():
    assert reduces_every(Layout(dp=2, zero=2))
    assert not reduces_every(Layout(dp=1, zero=2))
    assert reduces_every(Layout(pp=2, schedule="pipedream"))
    assert is_asynchronous(Layout(pp=2, schedule="pipedream"))
    assert not is_asynchronous(Layout(pp=2))


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_stages_cover_every_layer_once_or_the_layout_refuses(layers: int, pp: int, v: int) -> None:
    layout = Layout(pp=pp, v=v, schedule="interleaved")
    if layers < pp * v:
        with pytest.raises(RefusedError, match=f"at most {layers}"):
            layers_of_stages(layout, layers)
        return
    stages = layers_of_stages(layout, layers)
    assert sum(stages) == layers
    assert len(stages) == pp * v
    assert max(stages) - min(stages) <= 1


def test_thirty_layers_over_four_stages_leave_the_ends_lighter() -> None:
    assert layers_of_stages(Layout(pp=4), 30) == (7, 8, 8, 7)


def test_named_stages_must_add_up() -> None:
    assert layers_of_stages(Layout(pp=2, stages=(3, 1)), 4) == (3, 1)
    with pytest.raises(RefusedError, match="for example 3\\+2"):
        layers_of_stages(Layout(pp=2, stages=(3, 1)), 5)
