import colorsys
import random
import re
from importlib.resources import files
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.main import main
from phalanx.cli.plan_screen import CLASSES
from phalanx.core.errors import UsageError
from phalanx.core.message import Axis
from phalanx.explore.inputs import BY_KEY, INPUTS, fraction_of, nudged, read_value
from phalanx.explore.state import State

NUMBERS = [item for item in INPUTS if item.kind == "number"]


def some_state(seed: int) -> State:
    """A state that somebody might have dragged together."""
    draw = random.Random(seed)
    state = State()
    for item in draw.sample(INPUTS, 8):
        if item.kind == "choice":
            state = state.set({item.key: draw.choice(item.choices)})
        elif item.kind == "number":
            state = state.moved(item.key, draw.randrange(-8, 9))
    return state


@pytest.mark.parametrize("seed", range(50))
def test_a_link_brings_the_same_state_back(seed: int):
    state = some_state(seed)
    assert State.parse(state.query()) == state


def test_a_link_names_only_what_differs_from_the_default():
    assert State().query() == ""
    assert State.parse("v1&tp=8&dp=16").query() == ""
    assert State.parse("v1&tp=16").query() == "v1&tp=16"


def test_sizes_follow_the_model_and_rates_the_chip():
    state = State().set({"F": 4096}).set({"model": "deepseek-v3", "chip": "tpu-v5p"})
    assert (state["F"], state["E"], state["k"], state["s"]) == (2048, 257, 9, 1)
    assert (state["C"], state["W"]) == (459e12, 180e9)
    assert state.query() == "v1&model=deepseek-v3&chip=tpu-v5p"


def test_unknown_keys_are_kept_and_shown_and_bad_values_are_told():
    state = State.parse("v1&tp=abc&speed=<b>fast</b>&dp=32")
    assert state.unknown == (("speed", "<b>fast</b>"),)
    assert state["dp"] == 32
    assert "tp" in state.problems[0]
    assert State.parse(state.query()).unknown == state.unknown


def test_another_version_of_links_is_told():
    assert "version 7" in State.parse("v7&tp=16").problems[0]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("B", "3M", 3_000_000), ("F", "28672", 28672), ("F", "2^14", 16384), ("C", "1.5e15", 1.5e15),
     ("W", "450 GB/s", 450e9), ("B", "16Mi", 2**24)],
)  # fmt: skip
def test_a_box_reads_what_people_write(key: str, text: str, value: float):
    assert read_value(BY_KEY[key], text) == value


BAD_VALUES = [
    ("tp", "-1"),
    ("B", "many"),
    ("dp", "1.5"),
    ("F", "2^2^2"),
    ("C", "nan"),
    ("C", "inf"),
]


@pytest.mark.parametrize(("key", "text"), [*BAD_VALUES, ("tp", "9^99999")])
def test_a_box_says_what_it_cannot_read(key: str, text: str):
    with pytest.raises(UsageError, match=key):
        read_value(BY_KEY[key], text)


@given(st.sampled_from(NUMBERS), st.integers(-3000, 3000))
def test_no_number_of_steps_leaves_the_range(item, steps: int):
    value = nudged(item, State()[item.key], steps)
    assert item.low <= value <= item.high
    assert 0 <= fraction_of(item, value) <= 1


@given(st.sampled_from(NUMBERS))
def test_a_step_up_is_more_and_a_step_down_is_less(item):
    value = State()[item.key]
    if value < item.high:
        assert nudged(item, value, 1) > value
    if value > item.low:
        assert nudged(item, value, -1) < value


def test_the_command_sets_any_input_and_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str]):
    words = ["explore", "--json", "--set", "tp=16", "--set", "B=3M", "--set", "chip=tpu-v5p"]
    assert main(words) == 0
    assert '"state": "v1&chip=tpu-v5p&B=3000000&tp=16"' in capsys.readouterr().out
    assert main(["explore", "--set", "tq=16"]) == 2
    assert "did you mean tp" in capsys.readouterr().err
    assert main(["explore", "--set", "tp=many"]) == 2
    assert main(["explore", "--state", "v1&tp=many"]) == 2


@pytest.mark.parametrize("name", [*CLASSES, *get_args(Axis)])
def test_every_axis_and_class_of_memory_has_a_colour_in_both_themes(name: str):
    style = (files("phalanx.explore") / "static" / "style.css").read_text()
    light, _, dark = style.partition("prefers-color-scheme: dark")
    assert f"--{name}: #" in light
    assert f"--{name}: #" in dark
    assert f".c-{name} {{" in style


def test_the_page_has_the_terminals_hues_for_classes_of_memory():
    style = (files("phalanx.explore") / "static" / "style.css").read_text()
    hues = {"blue": 215, "cyan": 186, "magenta": 310, "yellow": 45, "red": 5, "green": 121}
    for name, (_, colour) in CLASSES.items():
        if colour not in hues:
            continue
        found = re.search(rf"--{name}: #(\w\w)(\w\w)(\w\w)", style)
        red, green, blue = (int(part, 16) / 255 for part in found.groups())
        hue = 360 * colorsys.rgb_to_hsv(red, green, blue)[0]
        assert min(abs(hue - hues[colour]), 360 - abs(hue - hues[colour])) < 15, name
