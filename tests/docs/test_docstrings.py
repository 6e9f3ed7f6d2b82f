"""Docstrings say what a function takes and what it raises, and stay that way."""

import runpy
from collections import defaultdict

import pytest
from pages import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "docstrings.py"))


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
        assert not short, "\n".join([room, *short])


def test_every_room_has_public_functions(by_room: dict[str, list]):
    assert len(by_room) >= 10
