"""The legend of letters and its page."""

from pathlib import Path

from phalanx.core.symbols import LEGEND, to_markdown

PAGE = Path(__file__).parents[2] / "docs" / "symbols.md"


def test_the_page_is_the_legend():
    assert PAGE.read_text() == to_markdown(), "run: python tools/symbols.py"


def test_no_letter_stands_twice():
    letters = [symbol.letter for symbol in LEGEND]
    assert len(letters) == len(set(letters))
