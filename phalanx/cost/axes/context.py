"""The context axis: what it refuses and holds. What it sends is in `cost/messages/context.py`."""

import numpy as np

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.run import Run
from phalanx.cost.table import Column, Table


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
