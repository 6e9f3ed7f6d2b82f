"""Wrong arithmetic of a moment is found by doing it again, before a weight has moved."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_corruption import equal, small, trained

from phalanx.oracle.pool import RankPool
from phalanx.trainer.faults import Fault

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("In the beginning was the word, and the word was a byte.\n" * 60)
    return path


def flip(point: str, rank: int, tensor: str, bit: int = 12) -> Fault:
    return Fault(point=point, action="flip", tensor=tensor, rank=rank, step=6, bit=bit)


@pytest.mark.parametrize(
    ("line", "fault", "named"),
    [
        ("dp=2", flip("reduce", 1, "gradient:"), 1),
        ("dp=2 zero=3", flip("reduce", 0, "gradient:head"), 0),
        ("dp=2 zero=0", flip("forward", 1, "activation", bit=22), 1),
        ("dp=2", flip("step.before_update", 1, "gradient:"), 1),
        ("dp=2 tp=2", flip("forward", 0, "activation", bit=22), None),
    ],
)
def test_a_gradient_activation_or_message_that_is_wrong_once_is_found(
    ranks: RankPool, tmp_path: Path, text: Path, line: str, fault: Fault, named: int | None
) -> None:
    run = small(text, line, check_every=0, repeat_every=2)
    assert trained(ranks, run, tmp_path / "whole") == []
    (event,) = trained(ranks, run, tmp_path / "run", fault)
    assert (event["rank"], event["step"]) == (named, 6)
    assert "the second time; going back to step 4" in event["text"]
    assert equal(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("line", ["dp=2 precision=fp8", "pp=2", "dp=2 ep=2", "tp=2 precision=bf16"])
def test_doing_passes_twice_changes_no_bit(
    ranks: RankPool, tmp_path: Path, text: Path, line: str
) -> None:
    runs = [small(text, line, check_every=0, repeat_every=every) for every in (0, 1)]
    if "ep" in line:
        runs = [replace(r, model=replace(r.model, experts=4, top_k=2, moe_ffn=16)) for r in runs]
    for name, run in zip("ab", runs, strict=True):
        assert trained(ranks, run, tmp_path / name) == []
    assert equal(tmp_path / "a", tmp_path / "b")
