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

import numpy as np

from phalanx.core.message import Axis, Collective
from phalanx.cost.messages.unit import Among, Pass, Setting, UnitMessage
from phalanx.cost.table import Booleans, Integers, Table

COUNT = 8  # bytes of a number of rows


def messages(setting: Setting) -> Iterator[UnitMessage]:
    """What the experts of each routed block send; with a capacity, at most."""
    if not setting.table.model.is_moe:
        return
    yield from _loads(setting)
    yield from _visits(setting)
    yield from _rows(setting)


def _loads(setting: Setting) -> Iterator[UnitMessage]:
    """How many tokens chose each expert, and how many were dropped: of all layers together."""
    table = setting.table
    size = np.full_like(table.tp, COUNT * (table.model.experts + 1))
    kinds: tuple[tuple[Axis, Among, str, Booleans], ...] = (
        ("data", "dp", "expert loads", table.dp * table.cp > 1),
        ("pipeline", "pp replicas", "expert loads both ways", setting.held.copies > 1),
    )
    for axis, among, purpose, rows in kinds:
        yield UnitMessage(
            axis=axis,
            among=among,
            collective="all_reduce",
            purpose=purpose,
            bytes=size,
            times=np.where(rows, 1, 0),
            when="step",
            unit="routed block",
            together=True,
        )


def _visits(setting: Setting) -> Iterator[UnitMessage]:
    table, recipe = setting.table, setting.table.recipe
    needed = recipe.balance_loss > 0 or recipe.capacity > 0
    size = 2 * table.cp * table.mb * table.model.experts * setting.wide
    for when, times in _forwards(setting, (table.cp > 1) & needed):
        yield UnitMessage(
            axis="context",
            among="cp",
            collective="all_gather",
            purpose="expert visits",
            bytes=size,
            times=times,
            when=when,
            unit="routed block",
        )


def _rows(setting: Setting) -> Iterator[UnitMessage]:
    table, shape = setting.table, setting.table.model
    size = (
        real_tokens(table, setting.at.cp) * table.mb * shape.top_k * shape.hidden * setting.element
    )
    counts = np.full_like(size, COUNT * shape.experts)
    spread = table.ep > 1
    for when, times in _forwards(setting, spread):
        yield _message("rows per expert", counts, times, when)
        yield _message("tokens", size, times, when)
        yield _message("expert results", size, times, when)
    for purpose in ("result gradients", "token gradients"):
        yield _message(purpose, size, np.where(spread, 1, 0), "input gradient")


def _message(purpose: str, size: Integers, times: Integers, when: Pass) -> UnitMessage:
    collective: Collective = "all_to_all"
    return UnitMessage(
        axis="expert",
        among="ep",
        collective=collective,
        purpose=purpose,
        bytes=size,
        times=times,
        when=when,
        unit="routed block",
    )


def _forwards(setting: Setting, rows: Booleans) -> Iterator[tuple[Pass, Integers]]:
    """Forward, and where whole blocks are computed again the forward that backward repeats."""
    yield "forward", np.where(rows, 1, 0)
    yield "recompute", np.where(rows & setting.by_segment, 1, 0)


def real_tokens(table: Table, cp: int) -> Integers:
    """Tokens of a sequence that a cp rank holds: two chunks, without the padding at the end.

    Args:
        table: the layouts.
        cp: the coordinate of the rank along cp.
    """
    seq = table.recipe.seq
    chunk = table.padded_seq // (2 * table.cp)
    mine = (cp, 2 * table.cp - 1 - cp)
    held = sum(np.clip(seq - i * chunk, 0, chunk) for i in mine)
    return np.where(table.cp > 1, held, seq)
