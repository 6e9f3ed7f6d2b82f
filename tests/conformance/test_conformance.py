"""What every axis says it sends is what a real step sends: kind, axis, bytes, count."""

from dataclasses import replace

import pytest
import torch

from phalanx.core.layout import Layout
from phalanx.core.message import Message
from phalanx.core.model import ModelShape
from phalanx.cost.messages import rank_messages
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Case, default_case
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh

LLAMA = ModelShape(layers=4, hidden=32, heads=4, kv_heads=2, ffn=70, vocab=97)
TIED = replace(LLAMA, tied=True)
GPT = ModelShape(
    layers=4,
    hidden=32,
    heads=4,
    vocab=96,
    tied=True,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    max_positions=64,
    bias=True,
)
QWEN = replace(LLAMA, qk_norm=True)
LATENT = replace(LLAMA, kv_heads=4, q_lora_rank=12, kv_lora_rank=10, qk_nope=6, qk_rope=4, v_head=5)
DIRECT = replace(LATENT, q_lora_rank=0)
MOE = replace(LLAMA, experts=4, top_k=2, moe_ffn=20, shared_experts=1, dense_layers=1)
WIDE = replace(LLAMA, layers=2, hidden=256, ffn=256, kv_heads=4)
SMALL = {
    "llama": LLAMA,
    "tied": TIED,
    "gpt": GPT,
    "qwen": QWEN,
    "latent": LATENT,
    "direct": DIRECT,
    "moe": MOE,
    "wide": WIDE,
}

CASES = [
    ("llama", "dp=2 zero=0"),
    ("llama", "dp=2 zero=1 mb=2"),
    ("tied", "dp=2 zero=2"),
    ("tied", "dp=2 zero=3"),
    ("gpt", "dp=3 zero=3"),
    ("gpt", "dp=4 shard=2 zero=1"),
    ("llama", "dp=4 shard=2 zero=3"),
    ("llama", "dp=2 shard=1 zero=3"),
    ("llama", "tp=2"),
    ("gpt", "tp=2 sp=off"),
    ("gpt", "tp=2 recompute=full"),
    ("llama", "tp=2 recompute=selective"),
    ("llama", "tp=2 recompute=norms+mlp logits=20"),
    ("tied", "tp=2 recompute=operators logits=32"),
    ("gpt", "tp=2 sp=off recompute=mlp+operators logits=1000"),
    ("llama", "dp=2 zero=3 recompute=full:3 logits=9"),
    ("tied", "dp=2 tp=2 zero=3 recompute=full:4 logits=32"),
    ("latent", "tp=2 recompute=full:2"),
    ("tied", "dp=2 zero=3 reshard=off recompute=full:3 offload=nvme"),
    ("gpt", "dp=4 shard=2 zero=1 offload=optimizer+activations"),
    ("qwen", "tp=2 sp=off"),
    ("qwen", "dp=2 tp=2 zero=3"),
    ("qwen", "tp=4 sp=off"),
    ("qwen", "cp=2 tp=4"),
    ("llama", "dp=2 tp=4 zero=2 recompute=full"),
    ("latent", "tp=2 sp=off recompute=selective"),
    ("latent", "pp=2 tp=2 recompute=full"),
    ("direct", "dp=2 tp=2 zero=2"),
    ("direct", "tp=2 sp=off recompute=full"),
    ("llama", "pp=2 schedule=gpipe"),
    ("tied", "pp=4"),
    ("tied", "pp=2 v=2 schedule=interleaved"),
    ("gpt", "pp=2 schedule=zb-h1 tp=2"),
    ("tied", "dp=2 pp=2 schedule=zb-h2 zero=2"),
    ("tied", "dp=2 pp=2 tp=2 schedule=zb-h1 zero=3 recompute=full"),
    ("tied", "pp=2 tp=2 schedule=zb-v"),
    ("gpt", "dp=2 pp=2 schedule=zb-v zero=3"),
    ("llama", "pp=2 schedule=dualpipev"),
    ("tied", "pp=4 schedule=dualpipe"),
    ("gpt", "dp=2 pp=2 tp=2 schedule=dualpipe zero=2"),
    ("gpt", "dp=2 pp=2 tp=2 zero=2"),
    ("tied", "dp=2 pp=2 tp=2 zero=3 recompute=full"),
    ("llama", "pp=2 tp=2 precision=bf16"),
    ("latent", "cp=2 zero=0"),
    ("tied", "cp=4 zero=1 mb=2 recompute=selective"),
    ("gpt", "cp=3 context=gather recompute=full"),
    ("llama", "dp=2 cp=2 shard=1 zero=2 context=ulysses precision=bf16"),
    ("latent", "pp=2 cp=2 zero=3 context=ulysses recompute=full"),
    ("tied", "dp=2 pp=2 cp=2 zero=3"),
    ("tied", "pp=2 cp=2 tp=2 zero=0 recompute=full"),
    ("tied", "dp=2 pp=2 tp=2 zero=3 precision=fp16"),
    ("moe", "dp=2 tp=2 zero=3 recompute=full"),
    ("moe", "pp=2 tp=2 sp=off"),
    ("moe", "dp=2 ep=2 zero=0"),
    ("moe", "dp=4 ep=2 tp=2 zero=3 recompute=full"),
    ("moe", "dp=4 shard=2 ep=2 zero=2 mb=2"),
    ("moe", "dp=2 ep=2 pp=2 zero=1 mb=2"),
    ("moe", "dp=2 ep=2 pp=2 schedule=dualpipe"),
    ("moe", "cp=2 ep=2 tp=2 recompute=full"),
    ("moe", "dp=2 ep=2 tp=2 recompute=norms+mlp"),
    ("moe", "tp=2 recompute=operators"),
    ("moe", "dp=2 cp=2 ep=4 zero=3"),
]


def last_step_job(case: Case) -> list[Message]:
    """Take the steps of the case, and say what the ledger of this rank holds after the last."""
    mesh = build_mesh(case.run.layout, torch.device("cpu"), kv_heads=case.run.model.kv_heads)
    engine, stream = build_engine(case.run, mesh), case.stream()
    for step in range(case.steps):
        mesh.ledger.clear()
        train_step(engine, step, stream.batch(step, engine.positions()))
    sent = mesh.ledger.messages()
    for unit in engine.units:
        unit.acquire()  # or the last weights would still be on their way when this rank leaves
    return sent


def seen_and_planned(ranks: RankPool, case: Case) -> list[tuple[list[Message], list[Message]]]:
    """For every rank: what its ledger holds after a step, and what the axes said before."""
    layout = case.run.layout
    sent = ranks.run(layout.ranks, last_step_job, case)
    planned = [rank_messages(case.run, layout.coordinates(rank)) for rank in range(layout.ranks)]
    return list(zip(sent, planned, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "line"), CASES)
def test_every_message_is_predicted_to_the_byte(ranks: RankPool, family: str, line: str) -> None:
    case = default_case(Layout.parse(line))
    case = replace(case, run=replace(case.run, model=SMALL[family]), steps=1)
    for seen, planned in seen_and_planned(ranks, case):
        assert seen == planned


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("llama", "dp=2 tp=2 precision=fp8"),
        ("gpt", "pp=2 tp=2 precision=fp8-current recompute=full"),
        ("latent", "cp=2 tp=2 precision=fp8-current"),
        ("llama", "cp=2 precision=fp8"),
        ("llama", "pp=2 tp=2 schedule=dualpipe precision=fp8"),
        ("moe", "tp=2 precision=fp8-current"),
        ("wide", "tp=2 precision=fp8-block"),
        ("wide", "dp=2 tp=2 zero=3 precision=mxfp8"),
        ("wide", "tp=2 sp=off precision=nvfp4"),
    ],
)
def test_products_in_few_bits_send_fewer_bytes_and_their_largest_values(
    ranks: RankPool, family: str, line: str
) -> None:
    case = default_case(Layout.parse(line))
    case = replace(case, run=replace(case.run, model=SMALL[family]), steps=2)  # one calibrates
    for seen, planned in seen_and_planned(ranks, case):
        assert seen == planned


@pytest.mark.ranks
def test_a_sequence_that_tp_and_cp_do_not_divide_is_counted_with_its_padding(
    ranks: RankPool,
) -> None:
    case = default_case(Layout.parse("tp=2 cp=2 pp=2"))
    recipe = replace(case.run.recipe, seq=33)
    case = replace(case, run=replace(case.run, recipe=recipe), steps=1)
    for seen, planned in seen_and_planned(ranks, case):
        assert seen == planned


@pytest.mark.ranks
def test_recompute_repeats_the_last_sum_of_a_block_only_under_dropout(ranks: RankPool) -> None:
    case = default_case(Layout.parse("tp=2 recompute=full"))
    recipe = replace(case.run.recipe, dropout=0.1)
    case = replace(case, run=replace(case.run, recipe=recipe), steps=1)
    for seen, planned in seen_and_planned(ranks, case):
        assert seen == planned


@pytest.mark.ranks
def test_experts_with_a_capacity_are_sent_less_and_as_often(ranks: RankPool) -> None:
    case = default_case(Layout.parse("dp=2 ep=2"))
    recipe = replace(case.run.recipe, capacity=0.5)
    case = replace(case, run=replace(case.run, model=MOE, recipe=recipe), steps=1)
    for seen, planned in seen_and_planned(ranks, case):
        assert [(t.purpose, t.times) for t in seen if t.axis != "expert"] == [
            (t.purpose, t.times) for t in planned if t.axis != "expert"
        ]
        for purpose in {t.purpose for t in planned if t.axis == "expert"}:
            mine, most = (
                [(t.times, t.times * t.bytes) for t in side if t.purpose == purpose]
                for side in (seen, planned)
            )
            assert sum(times for times, _ in mine) == sum(times for times, _ in most)
            sent, limit = sum(size for _, size in mine), sum(size for _, size in most)
            assert sent == limit if purpose == "rows per expert" else limit / 4 < sent <= limit / 2


def test_a_rank_alone_sends_nothing() -> None:
    case = default_case(Layout())
    assert rank_messages(case.run, case.run.layout.coordinates(0)) == []
