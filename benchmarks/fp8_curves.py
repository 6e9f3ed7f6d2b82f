"""How far the loss of products in few bits is from that of bf16, over some hundred steps of text.

A small Llama learns the sources of Python's standard library several times from the same weights
on the same batches, once in each precision. Curves are smoothed over 20 steps before they are
compared: single losses differ by chance, since rounding makes every run another one. How far fp32
is from bf16 shows how much of a difference is chance.

    python benchmarks/fp8_curves.py --precisions bf16,fp8,fp8-block --steps 300
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.data.batches import SampleStream
from phalanx.data.corpus import open_corpus
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import evaluate, train_step
from phalanx.trainer.parallel.mesh import build_mesh

WINDOW = 20
HELD_OUT_BATCHES = 8
SHAPE = ModelShape(layers=3, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=256, tied=True)


def curve(precision: str, steps: int) -> dict[str, list[float]]:
    """The loss of every step, and on held-out text at the end."""
    recipe = Recipe(seq=128, batch=8, steps=steps, warmup=20, learning_rate=2e-3)
    run = Run(model=SHAPE, layout=Layout(precision=precision, mb=8), recipe=recipe, data=Data())
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    training, held_out = (
        SampleStream(part, seq=recipe.seq, batch=recipe.batch, seed=0, document_mask=False)
        for part in _text()
    )
    losses = [
        train_step(engine, step, training.batch(step, engine.positions())).loss
        for step in range(steps)
    ]
    forward = engine.forward_executor(1, run.layout.mb, recipe.seq)
    final = [
        evaluate(engine, forward, held_out.batch(i, engine.positions()))
        for i in range(HELD_OUT_BATCHES)
    ]
    held_out_loss = sum(part.nats for part in final) / sum(part.tokens for part in final)
    return {"losses": losses, "held_out": [held_out_loss]}


def _text() -> Sequence:
    corpus = open_corpus(Data(), SHAPE.vocab)
    training, held_out = corpus.split(0.05, 128)
    if held_out is None:
        raise SystemExit("the text is too short to hold any out")
    return training, held_out


def smoothed(losses: list[float]) -> list[float]:
    """Means of windows that follow each other."""
    bounds = [*range(0, len(losses), WINDOW), len(losses)]
    return [statistics.fmean(losses[a:b]) for a, b in pairwise(bounds)]


def compared(curves: dict[str, dict[str, list[float]]], baseline: str) -> dict[str, dict]:
    """Each precision beside the baseline: the last window, the worst after warm-up, held out."""
    base = curves[baseline]
    result = {}
    for name, one in curves.items():
        pairs = list(zip(smoothed(one["losses"]), smoothed(base["losses"]), strict=True))
        off = [mine / theirs - 1 for mine, theirs in pairs]
        result[name] = {
            "last": pairs[-1][0],
            "held_out": one["held_out"][0],
            "last_off": off[-1],
            "worst_off": max(off[1:], key=abs, default=off[0]),
            "held_out_off": one["held_out"][0] / base["held_out"][0] - 1,
        }
    return result


def main() -> None:
    """Train in every precision and print how far apart they end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precisions", default="bf16,fp32,fp8,fp8-current,fp8-block,mxfp8,nvfp4")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the curves there")
    args = parser.parse_args()
    names = args.precisions.split(",")
    curves: dict[str, dict[str, list[float]]] = {}
    for name in names:
        curves[name] = curve(name, args.steps)
        print(f"{name} done: {curves[name]['held_out'][0]:.4f} held out", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(curves))
    table = compared(curves, names[0])
    print(
        f"{'precision':14} {'last 20':>8} {'off':>8} {'worst off':>10} {'held out':>9} {'off':>8}"
    )
    for name, row in table.items():
        print(
            f"{name:14} {row['last']:8.4f} {row['last_off']:+8.2%} {row['worst_off']:+10.2%} "
            f"{row['held_out']:9.4f} {row['held_out_off']:+8.2%}"
        )


if __name__ == "__main__":
    main()
