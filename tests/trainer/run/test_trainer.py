"""A run stops and goes on as if it had never stopped, under its own layout and under others."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_jobs import reshard_job, small_run, train_job

from phalanx.api.runfile import load_run
from phalanx.cli.main import main
from phalanx.core.errors import CheckpointError, RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.run import Run
from phalanx.oracle.pool import RankPool
from phalanx.trainer.checkpoint import newest
from phalanx.trainer.run.continuity import Resume

pytestmark = pytest.mark.ranks


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("In the beginning was the word, and the word was a byte.\n" * 60)
    return path


def tensors(directory: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of the newest checkpoint of a run, whole."""
    checkpoint = newest(directory, pytest.fail)
    assert checkpoint is not None
    with checkpoint:
        return {
            (name, field): checkpoint.tensor(name, field)
            for name in checkpoint.names()
            for field in checkpoint.fields(name)
        }


def equal(a: dict[tuple[str, str], torch.Tensor], b: dict[tuple[str, str], torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def under(run: Run, line: str, **recipe: int) -> Run:
    return replace(run, layout=Layout.parse(line), recipe=replace(run.recipe, **recipe))


def with_experts(run: Run) -> Run:
    model = replace(run.model, experts=4, top_k=2, moe_ffn=16, dense_layers=1)
    recipe = replace(run.recipe, balance_loss=0.01, balance_speed=0.01)
    return replace(run, model=model, recipe=recipe)


@pytest.mark.parametrize(
    "line",
    [
        "dp=1",
        "dp=2 pp=2 zero=3",
        "pp=2 tp=2",
        "dp=4 shard=2 zero=2",
        "dp=2 precision=fp16",
        "dp=2 cp=2",
        "tp=2 precision=fp8",
    ],
)
def test_half_a_run_and_the_other_half_are_the_whole_run_bit_for_bit(
    ranks: RankPool, tmp_path: Path, text: Path, line: str
) -> None:
    run = under(small_run(text), line)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    once = ranks.run(run.layout.ranks, train_job, run, whole)[0]
    first = ranks.run(run.layout.ranks, train_job, under(run, line, stop_at=4), halves)[0]
    second = ranks.run(run.layout.ranks, train_job, run, halves, Resume())[0]
    assert first.losses + second.losses == once.losses
    assert equal(tensors(whole / "checkpoints"), tensors(halves / "checkpoints"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2 pp=2 zero=3", "tp=2"),
        ("pp=2 tp=2", "dp=4 zero=1"),
        ("dp=1", "pp=4"),
        ("dp=2 pp=2 schedule=dualpipe", "pp=2 schedule=zb-v"),
        ("dp=4 shard=2 zero=3", "dp=2 tp=2 zero=2"),
        ("dp=2 cp=2 zero=3", "cp=2 tp=2 zero=1"),
        ("tp=2 precision=fp8", "pp=2 precision=fp8"),
        ("tp=4", "dp=2 tp=4 zero=3"),  # two ranks hold each of two key and value heads
        ("tp=4 zero=0", "dp=1"),
    ],
)
def test_every_tensor_is_the_same_bits_under_another_layout(
    ranks: RankPool, tmp_path: Path, text: Path, before: str, after: str
) -> None:
    run = under(small_run(text), before, stop_at=3)
    ranks.run(run.layout.ranks, train_job, run, tmp_path)
    source, again = tmp_path / "checkpoints", tmp_path / "again"
    other = under(run, after if "precision" in after else f"{after} precision=fp32")
    ranks.run(other.layout.ranks, reshard_job, other, source / "step-00000003", again)
    assert equal(tensors(source), tensors(again))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2 ep=2", "dp=2 tp=2 zero=3"),
        ("dp=1", "dp=4 shard=2 ep=2 zero=2"),
        ("dp=4 ep=4 zero=3", "dp=2 pp=2 ep=2 zero=0"),
    ],
)
def test_experts_are_the_same_bits_under_another_layout(
    ranks: RankPool, tmp_path: Path, text: Path, before: str, after: str
) -> None:
    run = with_experts(under(small_run(text), before, stop_at=3))
    ranks.run(run.layout.ranks, train_job, run, tmp_path)
    source, again = tmp_path / "checkpoints", tmp_path / "again"
    other = under(run, f"{after} precision=fp32")
    ranks.run(other.layout.ranks, reshard_job, other, source / "step-00000003", again)
    saved = tensors(source)
    assert equal(saved, tensors(again))
    assert saved["blocks.1.router.bias", "weight"].abs().max() > 0


def test_half_a_run_with_experts_and_the_other_half_are_the_whole_run(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = with_experts(under(small_run(text), "dp=2 ep=2 zero=2"))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    once = ranks.run(2, train_job, run, whole)[0]
    first = ranks.run(2, train_job, replace(run, recipe=replace(run.recipe, stop_at=4)), halves)[0]
    second = ranks.run(2, train_job, run, halves, Resume())[0]
    assert first.losses + second.losses == once.losses
    assert equal(tensors(whole / "checkpoints"), tensors(halves / "checkpoints"))


def test_the_load_of_experts_is_measured_in_every_step(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = with_experts(under(small_run(text), "dp=2 pp=2 ep=2", stop_at=4))
    run = replace(run, recipe=replace(run.recipe, capacity=1.0))
    trained = ranks.run(run.layout.ranks, train_job, run, tmp_path)
    assert len(trained[0].losses) == 4
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert 1 < line["expert_load"] < 4
        assert 0 < line["expert_dropped"] < 1


def test_the_next_loss_is_the_same_under_another_layout(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = under(small_run(text), "dp=2 precision=fp64", stop_at=3)
    ranks.run(2, train_job, run, tmp_path)
    source = tmp_path / "checkpoints" / "step-00000003"
    losses = [
        ranks.run(Layout.parse(line).ranks, reshard_job, under(run, line), source, tmp_path / name)[
            0
        ]
        for name, line in (("a", "dp=1 precision=fp64"), ("b", "pp=2 tp=2 precision=fp64"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_run_goes_on_with_another_number_of_ranks_and_sees_the_same_samples(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = small_run(text)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    once = ranks.run(1, train_job, under(run, "dp=1 precision=fp64"), whole)[0]
    losses = []
    for line, stop in (("dp=4", 2), ("dp=2 mb=2", 5), ("dp=4 zero=3", 8)):
        part = under(run, f"{line} precision=fp64", stop_at=stop)
        losses += ranks.run(part.layout.ranks, train_job, part, cut, Resume())[0].losses
    assert losses == pytest.approx(once.losses, rel=1e-10)


def test_a_request_to_stop_saves_and_says_that_the_run_can_go_on(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = under(small_run(text), "dp=2 pp=2")
    stopped = ranks.run(4, train_job, run, tmp_path, None, 2)  # heard when step 3 ends
    assert [rank.code for rank in stopped] == [75, 75, 75, 75]
    assert stopped[0].summary is not None
    assert stopped[0].summary.interrupted
    assert (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").exists()
    rest = ranks.run(4, train_job, run, tmp_path, Resume())[0]
    assert rest.code == 0
    assert len(rest.losses) == run.recipe.steps - 3


def test_resuming_skips_a_damaged_checkpoint_and_says_so(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = under(small_run(text), "dp=2", checkpoint_every=2, stop_at=4)
    ranks.run(2, train_job, run, tmp_path)
    shard = tmp_path / "checkpoints" / "step-00000004" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    resumed = ranks.run(2, train_job, run, tmp_path, Resume())[0]
    assert len(resumed.losses) == 2
    assert any("damaged" in event for event in resumed.events)
    assert (tmp_path / "checkpoints" / "corrupt-step-00000004").exists()


def test_resuming_with_another_batch_is_refused(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = under(small_run(text), "dp=1", stop_at=2)
    ranks.run(1, train_job, run, tmp_path)
    with pytest.raises(RefusedError, match=r"recipe\.batch was 8 and is 4: .*--from .*--force"):
        ranks.run(1, train_job, under(run, "dp=1", batch=4, stop_at=4), tmp_path, Resume())


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = under(small_run(text), "dp=1", stop_at=2)
    ranks.run(1, train_job, run, tmp_path)
    before = (tmp_path / "run.toml").read_text()
    wider = replace(run, model=replace(run.model, ffn=96))
    with pytest.raises(CheckpointError, match="the model it was started with"):
        ranks.run(1, train_job, under(wider, "dp=1", stop_at=4), tmp_path, Resume())
    with pytest.raises(UsageError, match=r"of step 2, and recipe.stop_at=1 ends before it; use"):
        ranks.run(1, train_job, under(run, "dp=1", stop_at=1), tmp_path, Resume())
    assert (tmp_path / "run.toml").read_text() == before


def test_a_finished_run_that_is_started_again_says_so_and_keeps_its_summary(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = under(small_run(text), "dp=2", stop_at=2)
    ranks.run(2, train_job, run, tmp_path)
    before = (tmp_path / "summary.json").read_text()
    again = ranks.run(2, train_job, run, tmp_path, Resume())[0]
    assert (again.code, again.losses) == (0, [])
    assert "all 2 steps are done; more need recipe.stop_at above 2" in again.events
    assert (tmp_path / "summary.json").read_text() == before


def test_what_a_summary_says_to_try_next_can_be_run(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = with_experts(under(small_run(text), "dp=2 ep=2 precision=fp16", stop_at=1))
    summary = ranks.run(2, train_job, run, tmp_path / "a run")[0].summary
    assert summary is not None
    assert len(summary.next_steps) == 2
    for command, _ in summary.next_steps:
        _, *words = shlex.split(command.replace("FOLDER", str(text)))
        assert main([*words, "--dry-run"]) == 0
        assert load_run(Path(words[1])).layout == run.layout


def test_a_run_directory_holds_what_scripts_rely_on(
    ranks: RankPool, tmp_path: Path, text: Path
) -> None:
    run = under(small_run(text), "pp=2", sample_tokens=8)
    summary = ranks.run(2, train_job, run, tmp_path)[0].summary
    assert summary is not None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert {"loss", "grad_norm", "lr", "tokens", "seconds", "mfu", "hfu"} <= lines[0].keys()
    trace = json.loads((tmp_path / "timeline.json").read_text())
    named = {event["name"] for event in trace["traceEvents"]}
    assert {"0F0", "0B0", "1F7", "1B7"} <= named
    threads = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {"waiting for pipeline", "waiting for world"}
    assert lines[0]["exposed_seconds"]["pipeline"] > 0
    assert summary.last_loss < summary.first_loss
    assert json.loads((tmp_path / "summary.json").read_text())["last_step"] == 8
    assert summary.sample.startswith("def ")
    split = {"compute", "waiting for pipeline", "waiting for world", "optimizer", "reading batches"}
    assert set(summary.time_split) == {*split, "validation", "checkpoints", "reports"}
    assert sum(summary.time_split.values()) == pytest.approx(summary.seconds, rel=0.05)
