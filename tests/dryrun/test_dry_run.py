"""Any rank of a job of any size, by the real trainer, held against the plan."""

import json
from dataclasses import replace
from random import Random

import pytest
import torch
from drawn_runs import drawn_runs

import phalanx
from phalanx.cli.main import main
from phalanx.core.layout import Layout
from phalanx.core.message import Message
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.cost.messages import rank_messages
from phalanx.dryrun.compare import RankCase, Rehearsed
from phalanx.dryrun.live_bytes import LiveBytes
from phalanx.dryrun.rehearse import Rehearsal, rehearse

LLAMA = ModelShape(hidden=1024, heads=16, kv_heads=8, ffn=4096, layers=8, vocab=32000)
MOE = replace(LLAMA, experts=16, top_k=2, moe_ffn=1024, dense_layers=1, shared_experts=1)
GPT2 = ("gpt2", "h100x8", "--batch", "8", "--seq", "256")
SIZES = [
    (LLAMA, "dp=512 pp=4 tp=8 zero=1 precision=bf16"),
    (LLAMA, "dp=4 zero=3 precision=bf16"),
    (LLAMA, "dp=2 pp=2 tp=4 cp=2 v=2 schedule=interleaved precision=bf16 recompute=selective"),
    (MOE, "dp=16 pp=2 ep=8 tp=2 zero=1 precision=bf16"),
    (MOE, "dp=4 pp=4 ep=4 schedule=zb-v precision=bf16"),
]


def run_of(shape: ModelShape, line: str, seq: int = 1024) -> Run:
    layout = Layout.parse(line)
    batch = 2 * layout.pp * layout.dp * layout.mb
    return Run(model=shape, layout=layout, recipe=Recipe(seq=seq, batch=batch))


@pytest.mark.parametrize(("shape", "line"), SIZES)
def test_a_rank_sends_and_holds_what_was_planned(shape: ModelShape, line: str):
    rehearsed = Rehearsed(run_of(shape, line))
    for rank in (0, rehearsed.run.layout.ranks - 1):
        assert rehearsed.case(rank).differences == ()


@pytest.mark.parametrize("part", range(4))
def test_whatever_can_be_trained_can_be_rehearsed_and_sends_what_the_list_says(part: int):
    for run in drawn_runs(24, seed=11)[part::4]:
        if not run.layout.offload:
            rank = Random(str(run.layout)).randrange(run.layout.ranks)
            planned = tuple(rank_messages(run, run.layout.coordinates(rank)))
            assert rehearse(run, rank).messages == planned, f"rank {rank} of {run.layout}"


def test_a_rank_of_many_costs_what_one_of_few_does():
    few, many = (run_of(LLAMA, f"dp={dp} pp=2 tp=2 zero=1 precision=bf16") for dp in (2, 262144))
    one, other = rehearse(few, 0), rehearse(many, few.layout.ranks)
    sent = [sum(message.times for message in found.messages) for found in (one, other)]
    assert sent[0] == sent[1]
    assert other.peak_bytes < one.peak_bytes


def test_there_is_one_rank_of_every_kind():
    rehearsed = Rehearsed(run_of(LLAMA, "dp=8 pp=4 tp=2 precision=bf16"))
    layout = rehearsed.run.layout
    stages = [layout.coordinates(rank).pp for rank in rehearsed.kinds]
    assert sorted(set(stages)) == [0, 1, 2, 3]
    assert len(rehearsed.kinds) < layout.ranks


def test_what_differs_is_shown_side_by_side():
    run = run_of(LLAMA, "dp=2 precision=bf16")
    sent, planned = (Message("data", "all_reduce", "loss", size, 1) for size in (8, 16))
    done = Rehearsal((sent,), 1 << 30, 1.0)
    case = RankCase(0, run.layout.coordinates(0), done, (planned,), 1.5 * (1 << 30))
    assert not case.passed
    assert case.differences == (
        "sent: data all_reduce of loss, 8 bytes x 1",
        "planned: data all_reduce of loss, 16 bytes x 1",
        "held: 1 GiB; planned: 1.5 GiB, +50.0%",
    )


def test_memory_that_grows_and_shrinks_in_place_is_seen():
    with LiveBytes() as live:
        x = torch.zeros(1000)
        live.expect_resizing(x)
        x.untyped_storage().resize_(0)
        torch.zeros(1)
        assert live.now < 100
        x.untyped_storage().resize_(8000)
        torch.zeros(1)
        assert live.peak >= 8000
        del x
        assert live.now < 100


def test_the_command_prints_one_document(capsys: pytest.CaptureFixture[str]):
    words = ["gpt2", "h100x64", "--layout", "pp=4 tp=2", "--batch", "32", "--seq", "256"]
    assert main(["dryrun", *words, "--rank", "63", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ranks"] == 64
    (case,) = document["cases"]
    assert case["coordinates"] == {"dp": 7, "pp": 3, "cp": 0, "tp": 1}
    assert case["messages_equal"]
    assert document["passed"]


@pytest.mark.parametrize(
    ("code", "words", "message"),
    [
        (2, ["gpt2", "h100x8"], "needs a --layout, and a step"),
        (2, ["gpt2", "h100x8", "--layout", "tp=2"], "--batch or --tokens"),
        (2, ["gpt3", "h100x8", "--layout", "tp=2", "--batch", "8"], "did you mean"),
        (2, ["nowhere.toml"], "nowhere.toml"),
        (2, ["run.toml", "--batch", "8"], "a run file says its layout and batch itself"),
        (2, [*GPT2, "--layout", "tp=2", "--rank", "8"], "ranks 0 to 7"),
        (3, [*GPT2, "--layout", "tp=8"], "heads"),
        (3, [*GPT2, "--layout", "offload=optimizer"], "cannot be rehearsed"),
    ],
)
def test_a_wrong_question_is_one_line(capsys, code: int, words: list[str], message: str):
    assert main(["dryrun", *words]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(phalanx.UsageError, match=r"rank is 64; .* has ranks 0 to 63"):
        phalanx.dry_run({"model": "gpt2", "layout": "dp=8 pp=4 tp=2"}, ranks=64)
