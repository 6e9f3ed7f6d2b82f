"""Tests stand where the code stands that they test."""

from pages import PACKAGE, ROOT

ACROSS = {  # what belongs to no single room
    "conformance": "what was planned against what ranks did",
    "docs": "what the pages say",
    "faults": "what breaks while it runs",
    "gpu": "what needs a GPU",
    "package": "what is published",
    "published": "worked numbers of books and papers",
}


def test_every_folder_of_tests_is_a_room_or_asks_across_rooms():
    folders = {
        path.parent.relative_to(ROOT / "tests").as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    for folder in folders - {"."}:
        assert (PACKAGE / folder).is_dir() or folder in ACROSS, folder


def test_every_room_has_tests():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for room in rooms:
        assert list((ROOT / "tests" / room).rglob("test_*.py")), f"no test of {room}"
