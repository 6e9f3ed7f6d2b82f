"""Lets the model write a little text, under whatever layout it is cut."""

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.train.loss import IGNORED
from phalanx.train.model.batch import MicroBatch
from phalanx.train.model.ends import Head
from phalanx.train.parameters import key_of, uniform_at
from phalanx.train.step import Engine

_ROUND = 32  # sequence lengths are rounded up to this, so that few shapes occur


def generate(engine: Engine, prompt: list[int], count: int, temperature: float = 0.7) -> list[int]:
    """Sample `count` tokens after `prompt`; every rank calls it and returns the same.

    Every token costs one forward pass over all of the text: no cache is kept, since this is a
    look at the model and not a way to serve it.

    Args:
        engine: of this rank.
        prompt: at least one token id.
        count: how many to add.
        temperature: divides the logits; lower is more certain.
    """
    tokens = list(prompt)
    window = engine.run.recipe.seq
    for index in range(count):
        context = tokens[-window:]
        tokens.append(_next(engine, context, temperature, index))
    return tokens[len(prompt) :]


def _next(engine: Engine, context: list[int], temperature: float, index: int) -> int:
    """The next token: chosen on the last stage, told to all ranks."""
    rounded = engine.run.layout.padded_seq(-(-len(context) // _ROUND) * _ROUND)
    padded = min(rounded, engine.executor_seq)
    executor = engine.forward_executor(1, 1, padded)
    batch = _batch(engine, context, padded)
    logits = executor.infer(batch)
    choice = torch.zeros(1, dtype=torch.int64, device=engine.mesh.device)
    last = (batch.places == len(context) - 1).nonzero()
    if logits is not None and len(last):
        row = _whole_row(engine, logits[int(last), 0]) / temperature
        key = key_of(f"{engine.run.recipe.seed}/generate/{index}")
        noise = uniform_at(key, torch.arange(len(row), device=row.device))
        pick = (row - (-noise.log()).log()).argmax()
        if engine.mesh.tensor.index == engine.mesh.at.dp == 0:
            choice += pick
    engine.mesh.world.all_reduce(choice, "next token").wait()
    return int(choice.item())


def _whole_row(engine: Engine, mine: Tensor) -> Tensor:
    """Put together the logits of one token, fp64, from the parts of the vocabulary."""
    head = next(p for s in engine.executor.stages.values() for p in s.parts if isinstance(p, Head))
    row = torch.zeros(engine.run.model.vocab, dtype=torch.float64, device=mine.device)
    row[head.part.first : head.part.first + len(mine)] = mine.double()
    engine.mesh.tensor.all_reduce(row, "logits").wait()
    return row


def _batch(engine: Engine, context: list[int], padded: int) -> MicroBatch:
    device, mine = engine.mesh.device, engine.context.my_part
    tokens = mine(F.pad(torch.tensor(context), (0, padded - len(context)))).unsqueeze(1).to(device)
    places = torch.arange(padded, device=device).clamp(max=len(context) - 1)
    return MicroBatch(
        tokens=tokens,
        targets=torch.full_like(tokens, IGNORED),
        positions=mine(places).unsqueeze(1),
        documents=None,
        samples=torch.zeros(1, dtype=torch.int64, device=device),
        seq=len(context),
        step=0,
        context=engine.context,
    )
