"""Docstrings say what a function takes and what it raises, and stay that way."""

import runpy
from collections import defaultdict

import pytest
from pages import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "docstrings.py"))

# Share of a room's public functions whose docstring leaves nothing out. It only rises; a room that
# is not named here leaves out nothing.
LEAST = {"trainer": 0.98}


@pytest.fixture(scope="module")
def by_room() -> dict[str, list]:
    """What each public function of two parameters or more leaves out."""
    found = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for lack in TOOL["lacks"]():
            found[lack.room].append(lack)
    return found


def test_public_functions_say_what_they_take_and_raise(by_room: dict[str, list]):
    for room, functions in by_room.items():
        short = [f"{it.where}: no {', '.join(it.missing)}" for it in functions if it.missing]
        share = 1 - len(short) / len(functions)
        assert share >= LEAST.get(room, 1.0), "\n".join([room, *short])


def test_every_room_has_public_functions(by_room: dict[str, list]):
    assert len(by_room) >= 10
    assert set(LEAST) <= set(by_room)
