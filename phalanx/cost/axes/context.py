"""The context axis: what attention sends. Its twin is phalanx/train/parallel/context.py.

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

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.layout import Coordinates
from phalanx.core.run import Run
from phalanx.core.traffic import Transfer
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
    again = layout.segment > 0 or "core" in layout.recomputed_parts
    passes = 2 if again else 1
    match layout.context:
        case "ring":
            yield from _ring(run, passes)
        case "gather":
            yield from _gather(run, passes)
        case "ulysses":
            yield from _ulysses(run, passes)


def _ring(run: Run, passes: int) -> Iterator[Transfer]:
    compute, wide = bytes_per_element(run.layout)
    hops, size = run.layout.cp - 1, _key_values(run)
    yield Transfer("context", "send", "keys and values", size * compute, hops * (passes + 1))
    yield Transfer("context", "send", "key and value gradients", size * wide, hops)


def _gather(run: Run, passes: int) -> Iterator[Transfer]:
    compute, wide = bytes_per_element(run.layout)
    size = run.layout.cp * _key_values(run)
    yield Transfer("context", "all_gather", "keys and values", size * compute, passes + 1)
    yield Transfer("context", "reduce_scatter", "key and value gradients", size * wide)


def _ulysses(run: Run, passes: int) -> Iterator[Transfer]:
    compute, _ = bytes_per_element(run.layout)
    shape, head = run.model, tokens_at(run) * run.model.heads // run.layout.tp * compute
    query, result = (
        (head * shape.qk_width, head * shape.v_head)
        if shape.is_mla
        else (head * shape.head_dim,) * 2
    )
    inputs = query + _key_values(run) * compute
    for purpose, size, times in (
        ("queries, keys and values", inputs, passes),
        ("attention result", result, passes),
        ("attention result and gradient", 2 * result, 1),
        ("query, key and value gradients", inputs, 1),
    ):
        yield Transfer("context", "all_to_all", purpose, size, times)


def _key_values(run: Run) -> int:
    """Elements of the keys and values of one rank, all its own heads together."""
    shape = run.model
    return tokens_at(run) * shape.kv_heads_of_rank(run.layout.tp) * shape.kv_width
