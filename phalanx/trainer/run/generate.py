"""Lets the model write a little text, under whatever layout it is cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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


class Sampling(NamedTuple):
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; lower is more certain, 0 takes the likeliest.
        top_k: only so many of the likeliest are in the draw; 0 sets no limit.
        top_p: only the likeliest whose shares add up to it are in the draw (Holtzman et al. 2019,
            arXiv:1904.09751).
        seed: of the draw.
        end: the token that ends a text; -1 where none does.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    end: int = -1


def generate(
    engine: Engine,
    prompt: list[int],
    count: int,
    sampling: Sampling | None = None,
    stop: StopSignal | None = None,
) -> list[int]:
    """Sample up to `count` tokens after `prompt`; see `generate_batch`.

    Args:
        engine: of this rank.
        prompt: at least one token id.
        count: how many to add.
        sampling: how; by default with the seed of the run.
        stop: ends the text early, on all ranks alike, once any of them is asked to stop.
    """
    return generate_batch(engine, [prompt], count, sampling, stop)[0]


def generate_batch(
    engine: Engine,
    prompts: list[list[int]],
    count: int,
    sampling: Sampling | None = None,
    stop: StopSignal | None = None,
) -> list[list[int]]:
    """Sample up to `count` tokens after each prompt; every rank calls it and returns the same.

    A token costs a pass over itself alone, while texts are no longer than the model's sequences:
    keys and values are kept. Beyond, it costs one over all of the text that the model sees.

    Args:
        engine: of this rank.
        prompts: of one length, at least one token id each.
        count: how many to add.
        sampling: how; by default with the seed of the run.
        stop: ends the texts early, on all ranks alike, once any of them is asked to stop.

    Returns:
        What was added to each, in their order; up to the token that ends a text, itself included.
    """
    sampling = sampling or Sampling(seed=engine.run.recipe.seed)
    device, seq = engine.mesh.device, engine.run.recipe.seq
    tokens = torch.tensor(prompts, device=device).t()
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    cache = KeyValueCache()
    for index in range(count):
        if len(tokens) <= seq:
            logits = _logits_of_new(engine, tokens, cache)
        else:
            logits = _logits(engine, tokens[-seq:])
        requested = stop is not None and stop.requested
        chosen, stopped = _choose(engine, logits, sampling, index, len(prompts), stop=requested)
        if stopped:
            break
        tokens = torch.cat((tokens, chosen.unsqueeze(0)))
        ended |= chosen == sampling.end
        if bool(ended.all()):
            break
    added = tokens[len(prompts[0]) :].t().tolist()
    return [_upto(row, sampling.end) for row in added]


def _upto(row: list[int], end: int) -> list[int]:
    return row[: row.index(end) + 1] if end in row else row


def _choose(
    engine: Engine,
    logits: Tensor | None,
    sampling: Sampling,
    index: int,
    count: int,
    *,
    stop: bool,
) -> tuple[Tensor, bool]:
    """The next token of each text: chosen where their logits [b, V/t] are, told to all ranks.

    Returns:
        The tokens [b], and whether any rank was asked to stop.
    """
    choice = torch.zeros(count + 1, dtype=torch.int64, device=engine.mesh.device)
    choice[-1] = int(stop)
    if logits is not None:
        rows = _whole_rows(engine, logits)
        if engine.mesh.tensor.index == engine.mesh.at.dp == 0:
            choice[:-1] = _drawn(rows, sampling, index)
    engine.mesh.world.all_reduce(choice, "next token").wait()
    return choice[:-1], int(choice[-1]) > 0


def _drawn(rows: Tensor, sampling: Sampling, index: int) -> Tensor:
    """One token of each row [b, V] of logits, by the Gumbel trick."""
    if not sampling.temperature:
        return rows.argmax(-1)
    rows = _likeliest(rows / sampling.temperature, sampling)
    key = key_of(f"{sampling.seed}/generate/{index}")
    counter = torch.arange(rows.numel(), device=rows.device).view_as(rows)
    noise = uniform_at(key, counter)
    return (rows - (-noise.log()).log()).argmax(-1)


def _likeliest(rows: Tensor, sampling: Sampling) -> Tensor:
    """Rows of logits in which what is not in the draw is -inf."""
    if sampling.top_k:
        least = rows.topk(min(sampling.top_k, rows.shape[-1])).values[:, -1:]
        rows = rows.masked_fill(rows < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, place = rows.sort(descending=True)
        shares = ordered.softmax(-1)
        beyond = shares.cumsum(-1) - shares >= sampling.top_p
        rows = rows.masked_fill(torch.zeros_like(beyond).scatter(-1, place, beyond), -torch.inf)
    return rows


def _logits(engine: Engine, context: Tensor) -> Tensor | None:
    """Of the last of tokens [s, b], by a pass over all; where the last stage and the token are."""
    rounded = engine.run.layout.padded_seq(-(-len(context) // _ROUND) * _ROUND)
    padded = min(rounded, engine.executor_seq)
    batch = _batch(engine, context, padded)
    logits = engine.forward_executor(1, context.shape[1], padded).infer(batch)
    last = (batch.places == len(context) - 1).nonzero()
    return None if logits is None or not len(last) else logits[int(last)]


def _logits_of_new(engine: Engine, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
    """Of the last of tokens [s, b], by a pass over those that the cache does not have yet.

    No axis cuts the sequence now: tp ranks share its few tokens whole, cp ranks do the same.
    """
    past, device, count = cache.length, engine.mesh.device, tokens.shape[1]
    new = tokens[past:]
    batch = MicroBatch(
        tokens=new,
        targets=torch.full_like(new, IGNORED),
        positions=torch.arange(past, len(tokens), device=device).unsqueeze(1).expand_as(new),
        documents=None,
        samples=torch.zeros(count, dtype=torch.int64, device=device),
        seq=len(tokens),
        step=0,
        context=cache,
    )
    cache.begin()
    with _whole_sequences(engine):
        parts = engine.run.layout.sequence_parts
        logits = engine.forward_executor(1, count, len(new) * parts).infer(batch)
    return None if logits is None or engine.mesh.at.cp else logits[-1]


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


def _whole_rows(engine: Engine, mine: Tensor) -> Tensor:
    """Put together logits [b, V], fp64, from the parts of the vocabulary."""
    head = next(p for s in engine.executor.stages.values() for p in s.parts if isinstance(p, Head))
    size = (len(mine), engine.run.model.vocab)
    rows = torch.zeros(size, dtype=torch.float64, device=mine.device)
    rows[:, head.part.first : head.part.first + mine.shape[-1]] = mine.double()
    engine.mesh.tensor.all_reduce(rows, "logits").wait()
    return rows


def _batch(engine: Engine, context: Tensor, padded: int) -> MicroBatch:
    device, mine, count = engine.mesh.device, engine.context.my_part, context.shape[1]
    tokens = mine(F.pad(context, (0, 0, 0, padded - len(context)))).to(device)
    places = torch.arange(padded, device=device).clamp(max=len(context) - 1)
    return MicroBatch(
        tokens=tokens,
        targets=torch.full_like(tokens, IGNORED),
        positions=mine(places).unsqueeze(1).expand_as(tokens),
        documents=None,
        samples=torch.zeros(count, dtype=torch.int64, device=device),
        seq=len(context),
        step=0,
        context=engine.context,
    )
