"""GPipe: every rank does all its forwards, then all its backwards.

Symbols: p pipeline ranks, m micro-batches.
Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3.
"""

from collections.abc import Iterator

from phalanx.core.schedule import Action, Kind, Schedule


def gpipe(p: int, m: int) -> Schedule:
    """Order the work of `m` micro-batches over `p` ranks.

    Every rank holds all m micro-batches in flight, and the step lasts (m + p - 1)
    forward-backward pairs: a bubble of (p - 1) / m. Backwards run in the order of the
    forwards, so that gradients are summed in the same order as under 1F1B.
    """
    rows = tuple(tuple(_row(stage, m)) for stage in range(p))
    return Schedule("gpipe", p, m, 1, rows, ranks=tuple(range(p)))


def _row(stage: int, m: int) -> Iterator[Action]:
    for i in range(m):
        yield Action(stage, Kind.FORWARD, i)
    for i in range(m):
        yield Action(stage, Kind.BACKWARD, i)
