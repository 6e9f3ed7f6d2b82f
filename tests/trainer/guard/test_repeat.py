"""Wrong arithmetic of a moment is found by doing it again, before a weight has moved."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from corruption_jobs import train_on_a_broken_unit
from test_corruption import equal, small, trained

from phalanx.core.errors import CheckpointError
from phalanx.core.layout import Layout
from phalanx.oracle.pool import RankPool
from phalanx.trainer.faults import Fault
from phalanx.trainer.guard.repeat import disagreeing

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


@pytest.mark.parametrize(
    ("line", "shows", "named"),
    [
        ("dp=2", True, "rank 1 has wrong numbers: a product"),  # its products tell the two apart
        ("dp=2 tp=2", True, "rank 1 has wrong numbers: a product"),
        ("dp=3", False, "rank 1 has wrong numbers: the same passes give others elsewhere"),
        ("dp=2", False, "one of ranks 0, 1 has wrong numbers: the same passes give others"),
    ],
)
def test_a_rank_that_is_wrong_in_the_same_way_each_time_is_found_by_its_neighbour(
    ranks: RankPool, tmp_path: Path, text: Path, line: str, shows: bool, named: str
) -> None:
    run = small(text, line, check_every=0, repeat_every=1, batch=6, checkpoint_every=1)
    job = partial(train_on_a_broken_unit, shows=shows)
    with pytest.raises(CheckpointError, match=rf"step 2: {named}.*again after it .* machine out"):
        ranks.run(run.layout.ranks, job, run, tmp_path, 1)


def test_who_is_part_of_every_disagreement_is_to_blame() -> None:
    layout = Layout.parse("dp=4")
    right = [(0, 1), (1, 2), (2, 3), (3, 0)]  # own passes, and those of the next
    assert disagreeing(right, layout) == set()
    assert disagreeing([(0, 9), *right[1:]], layout) == {0, 1}  # one pass: the two who did it
    assert disagreeing([right[0], (8, 9), *right[2:]], layout) == {1}
    assert disagreeing([(0, 9), right[1], (2, 9), right[3]], layout) == {0, 1, 2, 3}


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
