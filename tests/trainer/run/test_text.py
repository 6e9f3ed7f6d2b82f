"""The text of a run: bytes are read as words only by a model that was trained on bytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.errors import RefusedError
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.trainer.run.text import open_text


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 100)
    (tmp_path / "weights").mkdir()
    return Run(
        model=ModelShape(layers=2, hidden=32, heads=2),
        recipe=Recipe(seq=32, batch=4),
        data=Data(path=str(tmp_path / "book.txt"), validation=0.1),
        weights=str(tmp_path / "weights"),
    )


def test_a_model_of_bytes_reads_text(run: Run) -> None:
    text = open_text(run)
    assert text.held_out is not None
    assert text.held_out.num_batches == 3  # of four: ten windows, four at a time


def test_a_model_with_more_words_than_bytes_does_not(run: Run) -> None:
    model = replace(run.model, vocab=320)
    with pytest.raises(RefusedError, match=r"knows 320 ids, and book.txt would be read as bytes"):
        open_text(replace(run, model=model))
    assert open_text(replace(run, model=model, data=replace(run.data, trust=True)))
    assert open_text(replace(run, model=model, weights=""))  # that learns bytes from the beginning


def test_nor_does_one_with_a_tokenizer(run: Run) -> None:
    (Path(run.weights) / "tokenizer.json").touch()
    with pytest.raises(RefusedError, match=r"has a tokenizer \(tokenizer.json\), and book.txt"):
        open_text(run)


def test_nothing_is_held_out_where_nothing_is_validated(run: Run) -> None:
    assert open_text(replace(run, recipe=replace(run.recipe, evaluate_batches=0))).held_out is None
