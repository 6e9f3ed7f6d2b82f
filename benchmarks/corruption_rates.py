"""What a flipped bit does to a run by its place in the number, and which look finds it.

python benchmarks/corruption_rates.py --trials 5

In a small run on one process, one bit of one random weight or moment is flipped between two steps.
Three things are counted for each bit of fp32: whether the checksum of what lies at rest finds it
(`recipe.check_every`; with N, one flip in N falls between an update and the look that follows it),
whether the loss or the norm of the next steps stands out (`recipe.spike`), and whether the losses
change at all. Then what a look costs, against a step of the same run.
"""

import random
import time
from argparse import ArgumentParser
from collections import Counter

import torch
from torch import Tensor

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.synthetic import SyntheticStream
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.guard.corruption import CorruptionWatch
from phalanx.trainer.guard.spikes import LEAST
from phalanx.trainer.parallel.mesh import build_mesh

SHAPE = ModelShape(layers=1, hidden=32, heads=2, ffn=64, vocab=128)
RECIPE = Recipe(seq=16, batch=2, steps=1000, warmup=0, check_every=1)
AFTER = 5  # steps in which a flip may show
BITS = 32


def main() -> None:
    """Flip, look, count."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=5, help="flips of each bit")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    engine, steps = warm()
    found: dict[str, Counter[int]] = {key: Counter() for key in ("rest", "spike", "loss")}
    state = [x.clone() for x in kept(engine)]
    usual = losses(engine, steps)
    for bit in range(BITS):
        for _ in range(args.trials):
            back_to(engine, state)
            watch = CorruptionWatch(engine)
            watch.remember()
            flip(rng.choice(kept(engine)), rng, bit)
            found["rest"][bit] += watch.find() is not None
            spikes = engine.spikes.state()
            seen = losses(engine, steps)
            found["spike"][bit] += any(engine.spikes.find(*one) is not None for one in seen)
            engine.spikes.restore(spikes)
            found["loss"][bit] += seen != usual
    titles = f"{'at rest':>12}{'stands out':>12}{'changes a loss':>16}"
    print(f"{'bits':8}{titles}   of {args.trials} flips of each bit")
    for first, last, name in (
        (0, 11, ""),
        (12, 22, ""),
        (23, 29, "exponent"),
        (30, 30, ""),
        (31, 31, "sign"),
    ):
        count = args.trials * (last - first + 1)
        rates = [sum(found[key][bit] for bit in range(first, last + 1)) / count for key in found]
        print(f"{first:>4}-{last:<3}" + "".join(f"{rate:>12.0%}" for rate in rates) + f"   {name}")
    cost(engine, steps)


def warm() -> tuple[Engine, int]:
    """An engine that has taken enough steps for a loss to stand out."""
    run = Run(model=SHAPE, recipe=RECIPE)
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    for step in range(LEAST + 4):
        result = one_step(engine, step)
        engine.spikes.note(*result)
    return engine, LEAST + 4


def one_step(engine: Engine, step: int) -> tuple[float, float]:
    """Loss and norm of a step."""
    recipe = engine.run.recipe
    stream = SyntheticStream(engine.run.model.vocab, recipe.seq, recipe.batch, seed=1)
    result = train_step(engine, step, stream.batch(step, engine.positions()))
    return result.loss, result.grad_norm


def losses(engine: Engine, first: int) -> list[tuple[float, float]]:
    """Losses and norms of the steps in which a flip may show."""
    return [one_step(engine, first + i) for i in range(AFTER)]


def kept(engine: Engine) -> list[Tensor]:
    """Weights and moments."""
    units = [sharded.unit for sharded in engine.units]
    moments = [m for unit in units for m in engine.optimizer.moments(unit).values()]
    return [*(unit.master for unit in units), *moments]


def back_to(engine: Engine, state: list[Tensor]) -> None:
    """Undo what the last flip led to."""
    for now, before in zip(kept(engine), state, strict=True):
        now.copy_(before)
    engine.optimizer.updates = LEAST + 4
    for sharded in engine.units:
        moments = {name: m.clone() for name, m in engine.optimizer.moments(sharded.unit).items()}
        engine.optimizer.restore(sharded.unit, moments)
        sharded.all_gather_weights()


def flip(tensor: Tensor, rng: random.Random, bit: int) -> None:
    """Flip one bit of one element, in place."""
    words = tensor.view(torch.int32)
    place = rng.randrange(len(words))
    words[place] ^= torch.tensor(1 << bit if bit < BITS - 1 else -(1 << bit), dtype=torch.int32)


def cost(engine: Engine, first: int) -> None:
    """CPU seconds of a look, and of a step."""
    watch, repeats = CorruptionWatch(engine), 20
    start = time.process_time()
    for _ in range(repeats):
        watch.remember()
        watch.find()
    look = (time.process_time() - start) / repeats
    start = time.process_time()
    for i in range(repeats):
        one_step(engine, first + i)
    step = (time.process_time() - start) / repeats
    every = Recipe().check_every
    print(f"a look costs {look / step:.1%} of a step of this run; each {every}th, ", end="")
    print(f"{look / step / every:.3%}")


if __name__ == "__main__":
    main()
