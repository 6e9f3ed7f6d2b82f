"""Text grows by the tokens that a pass over all of it would choose, under any layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.batches import IGNORED, Batch
from phalanx.oracle.pool import RankPool
from phalanx.trainer.engine.batching import micro_batches
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.generate import Sampling, generate
from phalanx.trainer.run.worker import StopSignal

LLAMA = ModelShape(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=40)
LATENT = replace(LLAMA, kv_heads=4, kv_lora_rank=8, qk_nope=6, qk_rope=4, v_head=5)
GPT = replace(LLAMA, norm="layernorm", activation="gelu", positions="learned", bias=True)
EXPERTS = replace(LLAMA, experts=4, top_k=2, moe_ffn=16, dense_layers=1)
PROMPT, COUNT = [3, 1, 4, 1, 5], 9


def built(shape: ModelShape, line: str, seq: int, batch: int = 8) -> Engine:
    recipe = Recipe(seq=seq, batch=batch, init_std=0.4, seed=3)
    run = Run(model=shape, layout=Layout.parse(f"{line} precision=fp64"), recipe=recipe)
    mesh = build_mesh(run.layout, torch.device("cpu"), kv_heads=shape.kv_heads)
    return build_engine(run, mesh)


def written(shape: ModelShape, line: str, seq: int = 16) -> list[int]:
    """On every rank: what follows, the likeliest token each time."""
    return generate(built(shape, line, seq), PROMPT, COUNT, Sampling(temperature=0))


def expected(shape: ModelShape, seq: int = 16) -> list[int]:
    """The same by passes over the whole text on one device."""
    engine = built(shape, "dp=1", seq, batch=1)
    tokens = list(PROMPT)
    for _ in range(COUNT):
        text = np.array([tokens[-seq:] + [0] * (seq - len(tokens))])
        positions = np.arange(seq)[None]
        ignored = np.full_like(text, IGNORED)
        whole = Batch(tokens=text, targets=ignored, positions=positions, documents=None)
        (batch,) = micro_batches(engine, 0, whole)
        logits = engine.forward_executor(1, 1, seq).infer(batch)
        assert logits is not None
        tokens.append(int(logits[min(len(tokens), seq) - 1, 0].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "line"),
    [
        (LLAMA, "dp=1"),
        (LLAMA, "dp=2 tp=2 zero=3"),
        (GPT, "pp=2 tp=2"),
        (LATENT, "cp=2 tp=2"),
        (EXPERTS, "tp=2 sp=off"),
    ],
)
def test_the_likeliest_tokens_are_those_of_passes_over_the_whole_text(
    ranks: RankPool, shape: ModelShape, line: str
) -> None:
    wanted = expected(shape)
    assert len(set(wanted)) > 2
    count = Layout.parse(line).ranks
    assert ranks.run(count, written, shape, line) == [wanted] * count


@pytest.mark.ranks
def test_a_text_longer_than_the_sequence_goes_on_with_its_end(ranks: RankPool) -> None:
    wanted = expected(LLAMA, seq=8)
    assert ranks.run(2, written, LLAMA, "tp=2", 8) == [wanted] * 2


def cut_short(line: str, stops: int) -> list[int]:
    """On every rank: what is written once one of them is asked to stop."""
    engine = built(LLAMA, line, 16)
    stop = StopSignal()
    stop.requested = engine.run.layout.rank_at(engine.mesh.at) == stops
    return generate(engine, PROMPT, COUNT, stop=stop)


def test_a_stop_on_one_rank_ends_the_text_on_all(ranks: RankPool) -> None:
    assert ranks.run(2, cut_short, "tp=2", 1) == [[], []]
    nobody = ranks.run(2, cut_short, "tp=2", 2)
    assert [len(text) for text in nobody] == [COUNT, COUNT]
