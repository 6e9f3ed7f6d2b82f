"""Lets the model write a little text, under whatever layout it is cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.cache import KeyValueCache
from phalanx.trainer.model.ends import Head
from phalanx.trainer.model.loss import IGNORED
from phalanx.trainer.model.parameters import key_of, uniform_at
from phalanx.trainer.model.stage import StagePart
from phalanx.trainer.parallel.tensor import TensorParallel
from phalanx.trainer.run.worker import StopSignal

_ROUND = 32  # sequence lengths are rounded up to this, so that few shapes occur


def generate(
    engine: Engine,
    prompt: list[int],
    count: int,
    temperature: float = 0.7,
    stop: StopSignal | None = None,
) -> list[int]:
    """Sample `count` tokens after `prompt`; every rank calls it and returns the same.

    A token costs a pass over itself alone, while the text is no longer than the model's sequences:
    keys and values are kept. Beyond, it costs one over all of the text that the model sees.

    Args:
        engine: of this rank.
        prompt: at least one token id.
        count: how many to add.
        temperature: divides the logits; lower is more certain.
        stop: ends the text early, on all ranks alike, once any of them is asked to stop.
    """
    tokens = list(prompt)
    recipe = engine.run.recipe
    cache = KeyValueCache()
    for index in range(count):
        if len(tokens) <= recipe.seq:
            logits = _logits_of_new(engine, tokens, cache)
        else:
            logits = _logits(engine, tokens[-recipe.seq :])
        requested = stop is not None and stop.requested
        token, stopped = _choose(engine, logits, temperature, index, stop=requested)
        if stopped:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def _choose(
    engine: Engine, logits: Tensor | None, temperature: float, index: int, *, stop: bool
) -> tuple[int, bool]:
    """The next token: chosen where the logits [V/t] of the last one are, told to all ranks.

    Returns:
        The token, and whether any rank was asked to stop.
    """
    choice = torch.zeros(2, dtype=torch.int64, device=engine.mesh.device)
    choice[1] = int(stop)
    if logits is not None:
        row = _whole_row(engine, logits) / temperature
        key = key_of(f"{engine.run.recipe.seed}/generate/{index}")
        noise = uniform_at(key, torch.arange(len(row), device=row.device))
        pick = (row - (-noise.log()).log()).argmax()
        if engine.mesh.tensor.index == engine.mesh.at.dp == 0:
            choice[0] = pick
    engine.mesh.world.all_reduce(choice, "next token").wait()
    token, stops = choice.tolist()
    return token, stops > 0


def _logits(engine: Engine, context: list[int]) -> Tensor | None:
    """Of the last token, by a pass over all of them; where the last stage and the token are."""
    rounded = engine.run.layout.padded_seq(-(-len(context) // _ROUND) * _ROUND)
    padded = min(rounded, engine.executor_seq)
    batch = _batch(engine, context, padded)
    logits = engine.forward_executor(1, 1, padded).infer(batch)
    last = (batch.places == len(context) - 1).nonzero()
    return None if logits is None or not len(last) else logits[int(last), 0]


def _logits_of_new(engine: Engine, tokens: list[int], cache: KeyValueCache) -> Tensor | None:
    """Of the last token, by a pass over those that the cache does not have yet.

    No axis cuts the sequence now: tp ranks share its few tokens whole, cp ranks do the same.
    """
    past, device = cache.length, engine.mesh.device
    new = torch.tensor(tokens[past:], device=device).unsqueeze(1)
    batch = MicroBatch(
        tokens=new,
        targets=torch.full_like(new, IGNORED),
        positions=torch.arange(past, len(tokens), device=device).unsqueeze(1),
        documents=None,
        samples=torch.zeros(1, dtype=torch.int64, device=device),
        seq=len(new),
        step=0,
        context=cache,
    )
    cache.begin()
    with _whole_sequences(engine):
        parts = engine.run.layout.sequence_parts
        logits = engine.forward_executor(1, 1, len(new) * parts).infer(batch)
    return None if logits is None or engine.mesh.at.cp else logits[-1, 0]


@contextmanager
def _whole_sequences(engine: Engine) -> Iterator[None]:
    """Inside, sequence parallelism is off."""
    stages = engine.executor.stages.values()
    cut = {m.tp: m.tp.sequence for s in stages for p in s.parts for m in _of_tp(p)}
    for tp in cut:
        tp.sequence = False
    try:
        yield
    finally:
        for tp, sequence in cut.items():
            tp.sequence = sequence


def _of_tp(part: StagePart) -> Iterator[Any]:
    return (m for m in part.modules() if isinstance(getattr(m, "tp", None), TensorParallel))


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
