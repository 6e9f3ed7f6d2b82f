"""PipeDream: 1F1B without a flush, where every backward moves the weights at once.

Symbols: p pipeline ranks, m micro-batches.
Source: Narayanan et al. 2019 (SOSP; Harlap et al., arXiv:1806.03377), sections 3.2 and 3.3.
"""

from collections.abc import Iterator
from dataclasses import replace

from phalanx.core.schedule import Kind, Row
from phalanx.schedules.one_f_one_b import ONE_F_ONE_B

# The rows are those of 1F1B, but m counts the whole run rather than one step: the pipeline fills
# once, so the bubble (p - 1) / m vanishes. Instead of waiting for a flush, a rank keeps the weights
# that each micro-batch went forward with, for its backward (weight stashing).
PIPEDREAM = replace(
    ONE_F_ONE_B,
    name="pipedream",
    title="PipeDream",
    description="1F1B without a flush: every backward moves the weights, gradients are stale",
    source="Narayanan et al. 2019 (SOSP; Harlap et al., arXiv:1806.03377), sections 3.2 and 3.3",
    asynchronous=True,
    bubble=None,
)


def weight_delays(row: Row) -> tuple[int, ...]:
    """How many updates old each micro-batch's weights are when its gradient is applied.

    Rank r of PipeDream reaches p - 1 - r and stays there.

    Args:
        row: of one rank, with a single stage and whole backwards; other kinds count for nothing.

    Example:
        >>> weight_delays(PIPEDREAM.build(p=3, m=5).rows[0])
        (0, 1, 2, 2, 2)
    """
    updates = 0
    used: dict[int, int] = {}
    delays: list[int] = []
    for action in row:
        if action.kind is Kind.FORWARD:
            used[action.microbatch] = updates
        elif action.kind is Kind.BACKWARD:
            delays.append(updates - used[action.microbatch])
            updates += 1
    return tuple(delays)


def stashed_weights(row: Row) -> int:
    """The most versions of the weights that the rank holds at once, the newest included.

    Rank r of PipeDream needs min(p - r, m) at most.

    Args:
        row: of one rank, with a single stage and whole backwards; at least one action.
    """
    return max(len(versions) for versions in _versions(row))


def _versions(row: Row) -> Iterator[set[int]]:
    """The versions that micro-batches in flight still need, and the newest, action by action."""
    updates = 0
    used: dict[int, int] = {}
    for action in row:
        if action.kind is Kind.FORWARD:
            used[action.microbatch] = updates
        elif action.kind is Kind.BACKWARD:
            del used[action.microbatch]
            updates += 1
        yield {*used.values(), updates}
