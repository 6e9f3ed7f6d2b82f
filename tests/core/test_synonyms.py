"""A word of another program leads to the key that means the same."""

from dataclasses import fields

import pytest

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.core.synonyms import KEYS, TABLES, unknown_key

TYPES = {"model": ModelShape, "layout": Layout, "recipe": Recipe, "data": Data}


@pytest.mark.parametrize("word", KEYS)
def test_what_a_word_stands_for_is_a_key(word: str) -> None:
    table, _, key = KEYS[word].partition(".")
    assert key in {field.name for field in fields(TYPES[table])}
    assert word == word.lower()


def test_no_word_is_itself_a_key_of_its_table() -> None:
    for word, meant in KEYS.items():
        table, _, _ = meant.partition(".")
        assert word not in {field.name for field in fields(TYPES[table])}


def test_tables_of_other_programs_stand_for_ours() -> None:
    assert set(TABLES.values()) <= {field.name for field in fields(Run)}


def test_a_word_that_nobody_uses_is_answered_with_those_spelled_alike() -> None:
    keys = {"recipe": ["learning_rate", "batch"]}
    assert str(unknown_key("recipe", "bach", keys)).endswith("did you mean batch?")
    assert str(unknown_key("recipe", "xyzzy", keys)).endswith("known: batch, learning_rate")
