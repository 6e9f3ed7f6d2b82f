"""The last few checkpoints stay, and milestones for good."""

from pathlib import Path

import pytest
import torch

from phalanx.trainer.checkpoint import Piece, Saver
from phalanx.trainer.checkpoint.names import steps


def pieces(value: float) -> list[Piece]:
    data = torch.full((4,), value)
    return [Piece("w", "weight", (4,), (0,), (4,), 0, 4, data)]


def saved(directory: Path, last: int, **options: int) -> list[int]:
    """Steps of the checkpoints that are there once all are saved."""
    saver = Saver(directory, 0, 1, attempt="a", **options)
    for step in range(1, last + 1):
        saver.save(step, pieces(step), {})
    saver.wait()
    return [step for step, _ in steps(directory)]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_as_many_stay_as_are_asked_for(tmp_path: Path, keep: int) -> None:
    assert saved(tmp_path, 7, keep=keep) == list(range(7, 7 - keep, -1))


def test_every_so_many_steps_one_stays_for_good(tmp_path: Path) -> None:
    assert saved(tmp_path, 10, keep=2, keep_every=3) == [10, 9, 6, 3]
    assert saved(tmp_path, 10, keep=2) == [10, 9]


def test_numbers_are_compared_and_not_texts(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 0, 1, attempt="a")
    for step in (99_999_999, 100_000_000):
        saver.save(step, pieces(step), {})
    saver.wait()
    (tmp_path / "step-00000008.replaced-by-hand").mkdir()
    assert [path.name for _, path in steps(tmp_path)] == ["step-100000000", "step-99999999"]
