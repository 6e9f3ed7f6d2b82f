"""The context axis: what attention sends. Its twin is phalanx/trainer/parallel/context.py.

Splits: the sequence, s/c tokens on each rank, in two chunks that a causal mask loads alike.
Sends, in each block and micro-batch, for S = s/c b g/t (d + w) elements of keys and values:

    context    forward                            backward
    ring       send S, c - 1 times                the same again; send its gradient, c - 1 times
    gather     all-gather c S                     the same again; reduce-scatter c S of gradients
    ulysses    all-to-all of q, k and v,          all-to-all of the result and its gradient,
               all-to-all of the result           all-to-all of the gradients of q, k and v

Gradients that are added up on the way are as wide as those of weights; what is only moved is as
wide as activations. Where attention is computed again in backward, so is its forward sent again.
Sources: Liu et al. 2023 (arXiv:2310.01889), section 3; Llama 3 (arXiv:2407.21783), section 3.3.2;
Jacobs et al. 2023 (arXiv:2309.14509), section 3.
"""

from collections.abc import Iterator

import numpy as np

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.layout import Coordinates
from phalanx.core.run import Run
from phalanx.core.traffic import Transfer
from phalanx.cost.table import Column, Table
from phalanx.cost.units import bytes_per_element, passes, stages_at, tokens_at


def refuse(run: Run) -> None:
    """Raise RefusedError where ranks cannot trade tokens for heads."""
    layout, shape = run.layout, run.model
    if layout.context != "ulysses" or layout.cp == 1:
        return
    heads, kv_heads = shape.heads // layout.tp, shape.kv_heads_of_rank(layout.tp)
    if heads % layout.cp or kv_heads % layout.cp:
        fits = [c for c in divisors(heads) if kv_heads % c == 0]
        raise RefusedError(
            f"context=ulysses cannot split {heads} heads and {kv_heads} kv heads of a tp rank over "
            f"cp={layout.cp}; cp can be {shorten(fits)}, or use context=ring"
        )


def transfers(run: Run, at: Coordinates) -> Iterator[Transfer]:
    """What the rank at `at` sends along cp in one step."""
    layout = run.layout
    if layout.cp == 1:
        return
    blocks = sum(len(layers) for _, layers in stages_at(run, at))
    for transfer in _of_block(run):
        yield transfer._replace(times=transfer.times * blocks * passes(run))


def _of_block(run: Run) -> Iterator[Transfer]:
    """What one block sends for one micro-batch."""
    layout = run.layout
    again = layout.recompute.segment > 0 or "core" in layout.recompute.parts
    forwards = 2 if again else 1
    match layout.context:
        case "ring":
            yield from _ring(run, forwards)
        case "gather":
            yield from _gather(run, forwards)
        case "ulysses":
            yield from _ulysses(run, forwards)


def _ring(run: Run, forwards: int) -> Iterator[Transfer]:
    compute, wide = bytes_per_element(run.layout)
    hops, size = run.layout.cp - 1, _key_values(run)
    yield Transfer("context", "send", "keys and values", size * compute, hops * (forwards + 1))
    yield Transfer("context", "send", "key and value gradients", size * wide, hops)


def _gather(run: Run, forwards: int) -> Iterator[Transfer]:
    compute, wide = bytes_per_element(run.layout)
    size = run.layout.cp * _key_values(run)
    yield Transfer("context", "all_gather", "keys and values", size * compute, forwards + 1)
    yield Transfer("context", "reduce_scatter", "key and value gradients", size * wide)


def _ulysses(run: Run, forwards: int) -> Iterator[Transfer]:
    compute, _ = bytes_per_element(run.layout)
    shape, head = run.model, tokens_at(run) * run.model.heads // run.layout.tp * compute
    query, result = head * shape.qk_width, head * (shape.kv_width - shape.qk_width)
    inputs = query + _key_values(run) * compute
    for purpose, size, times in (
        ("queries, keys and values", inputs, forwards),
        ("attention result", result, forwards),
        ("attention result and gradient", 2 * result, 1),
        ("query, key and value gradients", inputs, 1),
    ):
        yield Transfer("context", "all_to_all", purpose, size, times)


def held_in_backward(table: Table, element: int) -> Column:
    """Bytes per token of a rank that attention holds at most while it is differentiated.

    For q elements of queries and results, k of keys and values, e bytes each and w while they are
    added up: 2 q of gradients come in, 2 k of blocks are here or on their way, and q + k leave the
    kernel. Beside that

        ring       w (q + 4 k)          what a rank adds to its own, to this block, and what
                                        arrives and leaves; 2 k between two ranks
        gather     w (q + (c + 2) k)    of all blocks at once, and c k of keys and values
        ulysses    e 2 (q + k)          of all tokens and of this rank's, before and after the trade
    """
    shape, t, c, wide = table.model, table.tp, table.cp, max(element, 4)
    q = shape.heads // t * shape.qk_width
    k = np.maximum(shape.kv_heads // t, 1) * shape.kv_width
    extra = {
        "ring": element * 2 * k + wide * (q + np.where(c > 2, 4, 2) * k),
        "gather": element * c * k + wide * (q + (c + 2) * k),
        "ulysses": element * 2 * (q + k),
    }
    beside = [table.context.test(lambda kind, name=name: kind == name) * more for name, more in extra.items()]
    return element * (2 * shape.hidden + q + k) + sum(beside)


def _key_values(run: Run) -> int:
    """Elements of the keys and values of one rank, all its own heads together."""
    shape = run.model
    return tokens_at(run) * shape.kv_heads_of_rank(run.layout.tp) * shape.kv_width
