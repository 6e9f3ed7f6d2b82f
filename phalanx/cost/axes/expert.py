"""The expert axis: what ep sends. Its twin is phalanx/trainer/parallel/expert.py.

Splits: the experts of each layer, E/e to a rank; ep borrows its ranks from dp x cp.
Sends, for T tokens of a micro-batch on one rank, K rows of h numbers for each, around each layer:

    forward     8 E bytes of counts, T K rows to the experts, T K rows of results back
    backward    T K rows of gradients of results there, T K of gradients of tokens back

Once a step the loads of all experts, and what was dropped, are added up over dp and cp. What
depends on whole sequences, capacity and the balance loss, has ranks along cp tell each other how
often each of their two chunks visits each expert.
A rank sends and gets back the rows of its own tokens, so none of this depends on how evenly the
router loads the experts. A capacity sends less: what is dropped does not travel. Every
tensor-parallel rank sends the rows of the whole sequence, to the ranks that hold the same part of
each expert. Source: DeepSeek-V3 (arXiv:2412.19437), section 3.2.2.
"""

from collections.abc import Iterator

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.layout import Coordinates
from phalanx.core.run import Run
from phalanx.core.traffic import Transfer
from phalanx.cost.units import bytes_per_element, passes, stages_at
from phalanx.schedules.layouts import placement

COUNT = 8  # bytes of a number of rows


def refuse(run: Run) -> None:
    """Raise RefusedError where experts cannot be computed, or not be spread over ep."""
    shape, layout = run.model, run.layout
    if shape.is_moe and shape.bias:
        raise RefusedError("experts have no biases here; use model.bias=false")
    if layout.ep == 1:
        return
    if not shape.is_moe:
        raise RefusedError(f"ep={layout.ep}, but the model has no experts; use ep=1")
    ranks = layout.sharers
    if ranks % layout.ep or shape.experts % layout.ep:
        fits = [e for e in divisors(ranks) if shape.experts % e == 0]
        raise RefusedError(
            f"ep={layout.ep} must divide {shape.experts} experts and the {ranks} ranks that share "
            f"a copy (shard x cp); ep can be {shorten(fits)}"
        )


def transfers(run: Run, at: Coordinates) -> Iterator[Transfer]:
    """What the rank at `at` sends along ep in one step; with a capacity, at most."""
    layout, shape, m = run.layout, run.model, passes(run)
    layers = sum(shape.routes(layer) for _, stage in stages_at(run, at) for layer in stage)
    loads = COUNT * layers * (shape.experts + 1)
    if layers and layout.dp * layout.cp > 1:
        yield Transfer("data", "all_reduce", "expert loads", loads)
    if layers and placement(layout).copies > 1:
        yield Transfer("pipeline", "all_reduce", "expert loads both ways", loads)
    again = layers if layout.recompute.segment else 0
    compute, wide = bytes_per_element(layout)
    forwards = m * (layers + again)
    if layout.cp > 1 and (run.recipe.balance_loss or run.recipe.capacity):
        visits = 2 * layout.cp * layout.mb * shape.experts * wide
        yield Transfer("context", "all_gather", "expert visits", visits, forwards)
    if layout.ep == 1:
        return
    size = _real_tokens(run, at.cp) * layout.mb * shape.top_k * shape.hidden * compute
    yield Transfer("expert", "all_to_all", "rows per expert", COUNT * shape.experts, forwards)
    for purpose, times in (
        ("tokens", forwards),
        ("expert results", forwards),
        ("result gradients", m * layers),
        ("token gradients", m * layers),
    ):
        yield Transfer("expert", "all_to_all", purpose, size, times)


def _real_tokens(run: Run, cp: int) -> int:
    """Tokens of a sequence that a cp rank holds: two chunks, without the padding at the end."""
    layout, seq = run.layout, run.recipe.seq
    if layout.cp == 1:
        return seq
    chunk = layout.padded_seq(seq) // (2 * layout.cp)
    return sum(min(max(seq - i * chunk, 0), chunk) for i in (cp, 2 * layout.cp - 1 - cp))
