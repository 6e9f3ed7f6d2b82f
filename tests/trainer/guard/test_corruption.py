"""A flipped bit is found, the rank that has it is named, and the run ends as if it never was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corruption_jobs import train_injured
from hypothesis import given
from hypothesis import strategies as st
from saved_tensors import equal

from phalanx.core.errors import CheckpointError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.faults import Fault, FaultPlan
from phalanx.trainer.guard.corruption import blame, checksum
from phalanx.trainer.run.events import read_events

SHAPE = ModelShape(layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256, tied=False)
RECIPE = Recipe(
    seq=16,
    batch=4,
    steps=8,
    warmup=2,
    evaluate_batches=0,
    sample_tokens=0,
    checkpoint_every=4,
    keep=9,
    spike="off",
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)


@given(st.sampled_from(DTYPES), st.integers(1, 5000), st.data())
def test_any_flipped_bit_changes_a_checksum(dtype: torch.dtype, size: int, data: Any) -> None:
    x = torch.arange(size).to(dtype)
    before = checksum(x)
    raw = x.view(torch.uint8)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert checksum(x) != before
    raw[bit // 8] ^= 1 << bit % 8
    assert checksum(x) == before


def test_what_has_moved_changes_a_checksum_too() -> None:
    x = torch.randn(3000)
    assert checksum(x) != checksum(x.flip(0))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ((1, 1, 1, 2), (13,)),
        ((2, 1, 1), (10,)),
        ((1, 2), (10, 11)),
        ((1, 1, 2, 2), (10, 11, 12, 13)),
        ((1, 2, 1, 3, 1), (11, 13)),
    ],
)
def test_the_few_are_to_blame_and_all_where_there_is_no_majority(
    row: tuple[int, ...], named: tuple[int, ...]
) -> None:
    assert blame(row, range(10, 10 + len(row))) == named


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("In the beginning was the word, and the word was a byte.\n" * 60)
    return path


def small(text: Path, line: str, **recipe: Any) -> Run:
    return Run(
        model=SHAPE,
        recipe=replace(RECIPE, **recipe),
        data=Data(path=str(text), validation=0.1),
        layout=Layout.parse(line),
    )


def trained(ranks: RankPool, run: Run, folder: Path, *planned: Fault) -> list[dict[str, Any]]:
    """Train, and say what was suspected."""
    folder.mkdir()
    codes = ranks.run(run.layout.ranks, train_injured, run, folder, FaultPlan(planned))
    assert set(codes) == {0}
    found = read_events(folder / "events.jsonl")
    return [event for event in found if event["kind"] == "suspicion"]


def flip(tensor: str, rank: int, step: int = 6) -> Fault:
    return Fault(point="step.before", action="flip", tensor=tensor, rank=rank, step=step, bit=3)


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["dp=2", "tp=2 precision=bf16"])
def test_a_product_that_comes_out_wrong_is_found_and_its_rank_named(
    ranks: RankPool, tmp_path: Path, text: Path, line: str
) -> None:
    """Every product goes through one; a wrong one is told before a checkpoint holds what it did."""
    top = 14 if "bf16" in line else 30  # the highest bit of the exponent
    wrong = Fault(point="product", action="flip", tensor="product:", rank=1, step=6, bit=top)
    run = small(text, line, check_every=10, clip=1e-3)
    assert trained(ranks, run, tmp_path / "whole") == []
    (event,) = trained(ranks, run, tmp_path / "run", wrong)
    assert (event["rank"], event["data"]["to"]) == (1, 4)
    assert "times what rounding allows; going back to step 4" in event["text"]
    assert equal(tmp_path / "whole", tmp_path / "run")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("line", "tensor", "rank"),
    [
        ("dp=2", "weight:blocks.1", 1),
        ("dp=2", "exp_avg:head", 0),
        ("dp=2 zero=0", "weight:blocks.1", 1),
        ("dp=2 zero=3", "exp_avg_sq:blocks.0", 0),
        ("dp=4 shard=2 zero=3", "weight:", 1),
        ("tp=2 pp=2", "weight:blocks.1.mlp", 2),
        ("dp=2 precision=bf16", "weight:norm", 1),
    ],
)
def test_a_bit_that_flips_at_rest_is_found_before_it_is_used_and_its_rank_is_named(
    ranks: RankPool, tmp_path: Path, text: Path, line: str, tensor: str, rank: int
) -> None:
    run = small(text, line, check_every=1)
    assert trained(ranks, run, tmp_path / "whole") == []
    (event,) = trained(ranks, run, tmp_path / "run", flip(tensor, rank))
    assert (event["rank"], event["step"]) == (rank, 6)
    assert "changed since the update that made it; going back to step 4" in event["text"]
    assert equal(tmp_path / "whole", tmp_path / "run")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("line", "rank", "named"),
    [("dp=3 zero=0", 1, 1), ("dp=4 zero=0", 0, 0), ("dp=2 zero=0", 1, None)],
)
def test_one_that_flipped_long_ago_is_found_by_the_copies_before_anything_is_saved(
    ranks: RankPool, tmp_path: Path, text: Path, line: str, rank: int, named: int | None
) -> None:
    """Case 15: with zero=0 the replicas part for ever."""
    run = small(text, line, check_every=100, batch=12)
    assert trained(ranks, run, tmp_path / "whole") == []
    (event,) = trained(ranks, run, tmp_path / "run", flip("weight:blocks.1", rank, step=5))
    assert (event["rank"], event["step"]) == (named, 8)
    assert "differ between ranks" in event["text"]
    assert equal(tmp_path / "whole", tmp_path / "run")


@pytest.mark.ranks
def test_a_machine_that_does_it_again_is_to_be_taken_out(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = small(text, "dp=2", check_every=1)
    with pytest.raises(CheckpointError, match=r"rank 1 has wrong .*, again after it went back; ta"):
        trained(ranks, run, tmp_path / "run", replace(flip("weight:head", 1), times=9))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "line",
    [
        "dp=2 zero=2",
        "dp=4 shard=2 zero=1",
        "dp=2 tp=2",
        "dp=2 pp=2 zero=0",
        "pp=2 schedule=dualpipe",
        "dp=2 cp=2",
        "dp=2 offload=optimizer",
        "tp=2 precision=bf16",
    ],
)
def test_where_nothing_is_wrong_nothing_is_suspected(
    ranks: RankPool, tmp_path: Path, text: Path, line: str
) -> None:
    tied = "dualpipe" not in line
    run = small(text, line, check_every=1, steps=5)
    run = replace(run, model=replace(run.model, tied=tied, layers=4))
    assert trained(ranks, run, tmp_path / "run") == []
