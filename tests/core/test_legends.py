"""The legends of letters, words and quantities."""

import pytest

from phalanx.core.glossary import GLOSSARY
from phalanx.core.quantities import QUANTITIES
from phalanx.core.symbols import LEGEND


@pytest.mark.parametrize(
    "names",
    [
        [symbol.letter for symbol in LEGEND],
        [entry.word for entry in GLOSSARY],
        [quantity.name for quantity in QUANTITIES],
    ],
    ids=["letters", "words", "quantities"],
)
def test_nothing_stands_twice_in_a_legend(names: list[str]):
    assert len(names) == len(set(names))


def test_words_are_in_order():
    words = [entry.word.lower() for entry in GLOSSARY]
    assert words == sorted(words)
