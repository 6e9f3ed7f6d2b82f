"""`phalanx help` explains keys, quantities and words."""

import json

import pytest

from phalanx.cli.main import main

Captured = pytest.CaptureFixture[str]


def shown(capsys: Captured, *words: str) -> str:
    assert main(("help", *words)) == 0
    return capsys.readouterr().out


def test_a_key_has_its_meaning_default_values_and_example(capsys: Captured):
    text = shown(capsys, "recipe.clip")
    assert "largest global gradient norm" in text
    assert "default  1.0" in text
    assert "values   a number" in text
    assert "--set recipe.clip=0.5" in text


def test_without_a_key_all_of_them_are_listed(capsys: Captured):
    text = shown(capsys)
    for name in ("layout.zero", "recipe.clip", "data.separator", "step_seconds", "micro-batch"):
        assert name in text


def test_a_table_lists_its_keys_one_to_a_line(capsys: Captured):
    lines = shown(capsys, "recipe").splitlines()
    assert any(line.startswith("recipe.clip ") for line in lines)


def test_a_word_of_several_is_asked_for_as_it_is_written(capsys: Captured):
    assert "what tp leaves whole" in shown(capsys, "sequence", "parallelism")


def test_json_has_the_same(capsys: Captured):
    document = json.loads(shown(capsys, "zero", "--json"))
    assert document["schema"] == 1
    assert [t["name"] for t in document["topics"]] == ["layout.zero", "ZeRO"]
    assert document["topics"][0]["values"] == "0, 1, 2, 3"


def test_an_unknown_key_is_one_line_and_a_wrong_usage(capsys: Captured):
    assert main(("help", "recipe.clp")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown topic 'recipe.clp'; did you mean recipe.clip or ")
    assert error.count("\n") == 1
