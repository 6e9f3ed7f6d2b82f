"""A step that overflows changes the loss scale and nothing else, also where a run goes on later."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from skipping_jobs import around_a_skipped_step, run_job, same

from phalanx.core.run import Run
from phalanx.oracle.cases import CaseSpec
from phalanx.oracle.pool import RankPool
from phalanx.trainer.checkpoint import Checkpoint

pytestmark = pytest.mark.ranks

SMALL: Mapping[str, Mapping[str, Any]] = {
    "model": {"layers": 3, "hidden": 32, "ffn": 48},
    "recipe": {"seq": 16, "steps": 40, "warmup": 30, "clip": 0.0},
}
BEFORE, AFTER = (0, 10), (10, 20)
OVERFLOWS = (2, 3, 7, 12, 13, 17)  # around the checkpoint


def small(line: str, *features: str) -> Run:
    return CaseSpec(line, features, tables=SMALL).case().run


@pytest.mark.parametrize(
    ("line", "features"),
    [
        ("dp=2 mb=4 precision=fp16", ("deepseek",)),
        ("dp=2 ep=2 zero=3 mb=4 precision=fp16", ("deepseek", "tied")),
        ("pp=2 mb=4 schedule=zb-h1 optimistic=on precision=fp16", ("deepseek",)),
        ("dp=2 zero=2 mb=4 precision=bf16", ("stochastic", "bf16-moments", "deepseek")),
        ("tp=2 mb=8 precision=fp16", ("sgd",)),
        ("dp=2 mb=4 offload=optimizer precision=fp16", ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [0, 2])
def test_a_skipped_step_leaves_every_byte_but_the_loss_scale(
    ranks: RankPool, line: str, features: tuple[str, ...], before: int
) -> None:
    run = small(line, *features)
    scaled = "fp16" in line
    for was, now in ranks.run(run.layout.ranks, around_a_skipped_step, run, before):
        assert same(was, now) == (["loss scale"] if scaled else [])
        assert now["counters"]["updates"] == before
        if scaled:
            assert now["loss scale"]["value"] == was["loss scale"]["value"] / 2
            assert now["loss scale"]["clean"] == 0


def tensors(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Everything that the last step saved, whole."""
    with Checkpoint.open(folder / "step-00000020") as found:
        names = [(name, field) for name in found.names() for field in found.fields(name)]
        return {(name, field): found.tensor(name, field) for name, field in names}


def state(folder: Path) -> dict[str, Any]:
    """What it saved that is not a tensor, but for the layout."""
    with Checkpoint.open(folder / "step-00000020") as found:
        return {key: value for key, value in found.state.items() if key != "layout"}


def halves(ranks: RankPool, first: Run, second: Run, folder: Path) -> list[Any]:
    """Ten steps, and ten more from a checkpoint."""
    ranks.run(first.layout.ranks, run_job, first, BEFORE, OVERFLOWS, folder)
    return ranks.run(second.layout.ranks, run_job, second, AFTER, OVERFLOWS, folder)


@pytest.mark.parametrize(
    ("line", "then", "features"),
    [
        ("dp=2 mb=4", "dp=2 mb=4", ("deepseek",)),
        ("dp=2 mb=4", "dp=2 zero=0 mb=4", ()),
        ("pp=2 mb=4", "mb=4", ("deepseek",)),
        ("mb=4", "pp=2 mb=4", ("qk-norm", "bf16-moments")),
    ],
)
def test_ten_steps_and_ten_more_are_twenty_bit_for_bit_whichever_overflow(
    ranks: RankPool, tmp_path: Path, line: str, then: str, features: tuple[str, ...]
) -> None:
    first, second = (small(f"{words} precision=fp16", *features) for words in (line, then))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    once = ranks.run(first.layout.ranks, run_job, first, (0, 20), OVERFLOWS, whole)
    again = halves(ranks, first, second, cut)
    kept, kept_whole = tensors(cut), tensors(whole)
    assert kept.keys() == kept_whole.keys()
    assert [key for key in kept if not torch.equal(kept[key], kept_whole[key])] == []
    assert state(cut) == state(whole)
    assert state(cut)["updates"] == 14
    assert state(cut)["loss_scale"] == [2.0**10, 2]
    if line == then:
        assert [same(a, b) for a, b in zip(once, again, strict=True)] == [[]] * len(once)


def nothing(state: dict[str, Any]) -> None:
    """Leave it as it is."""


def set_to(key: str, value: object, state: dict[str, Any]) -> None:
    state[key] = value


def dropped(key: str, state: dict[str, Any]) -> None:
    del state[key]


@pytest.mark.parametrize(
    "change",
    [
        partial(set_to, "updates", 10),  # the step instead of the updates
        partial(set_to, "updates", 0),
        partial(set_to, "loss_scale", [2.0**16, 2]),
        partial(set_to, "loss_scale", [2.0**13, 0]),
        partial(dropped, "loss_scale"),
    ],
    ids=lambda change: " ".join(map(str, change.args)),
)
def test_no_number_of_a_checkpoint_can_be_lost_or_mixed_up_unnoticed(
    ranks: RankPool, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    run = small("mb=8 precision=fp16")
    ranks.run(1, run_job, run, BEFORE, OVERFLOWS, tmp_path)
    (right,) = ranks.run(1, run_job, run, (10, 12), (), tmp_path, nothing)
    (wrong,) = ranks.run(1, run_job, run, (10, 12), (), tmp_path, change)
    assert same(right, wrong) != []
