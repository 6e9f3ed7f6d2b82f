"""Zero-bubble schedules: weight gradients, for which nobody waits, fill the idle time.

Symbols: p pipeline ranks, m micro-batches, F, I, W the seconds of a forward, an input gradient
and a weight gradient. The papers write B for I.
Their bubble is the time that a rank idles between its own first and last action (the worst
rank's): the optimizer step needs no barrier, so ranks may start late and end late.
Sources: Qi et al. 2024 (arXiv:2401.10241), sections 2 and 6; for ZB-V also Qi et al. 2024
(arXiv:2405.15362), where it is one of several V-shaped schedules.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from phalanx.core.errors import RefusedError
from phalanx.core.schedule import Action, Kind, Row
from phalanx.schedules.bubble import PaperBubble, PassSeconds
from phalanx.schedules.formulas import (
    Floats,
    Integers,
    Peaks,
    Pipes,
    largest,
    smallest,
    with_bubble,
    with_bubble_of_v,
)
from phalanx.schedules.placement import folded, looped
from phalanx.schedules.sizes import TWO
from phalanx.schedules.spec import ScheduleSpec

StageMove = tuple[int, Kind]  # a stage and what it does next; micro-batches are counted later


def rows_h1(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches over `p` ranks, in the memory of 1F1B.

    Every rank holds min(p, m) micro-batches in flight, as the first rank of 1F1B does. For
    m >= p and W <= F, W <= I, the bubble is (p - 1)(F + I - W): a third of 1F1B's if F = I = W.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: not read: it is 1.

    Example:
        >>> for row in rows_h1(p=2, m=2, v=1):
        ...     print(*row)
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    return tuple(tuple(_row(stage, m, p - 1 - stage, stage)) for stage in range(p))


def rows_h2(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches over `p` ranks, in about twice the memory of 1F1B.

    Every rank holds min(2 p - 1, m) micro-batches in flight. For m >= 2 p - 1 and W <= F,
    W <= I, the bubble is (p - 1)(F + I - 2 W): none if F = I = W.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: not read: it is 1.
    """
    return tuple(tuple(_row(stage, m, 2 * (p - 1 - stage), 2 * stage)) for stage in range(p))


def _row(stage: int, m: int, warmup: int, delay: int) -> Iterator[Action]:
    """Warm up with forwards; then F, I, W in turn, with W `delay` micro-batches behind."""
    warmup = min(warmup, m)
    for i in range(warmup):
        yield Action(stage, Kind.FORWARD, i)
    for i in range(m):
        if warmup + i < m:
            yield Action(stage, Kind.FORWARD, warmup + i)
        yield Action(stage, Kind.INPUT_GRAD, i)
        if i >= delay:
            yield Action(stage, Kind.WEIGHT_GRAD, i - delay)
    for i in range(max(m - delay, 0), m):
        yield Action(stage, Kind.WEIGHT_GRAD, i)


def rows_v(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches over `p` ranks whose two stages form a V.

    Rank r holds stage r on the way down and stage 2 p - 1 - r on the way up, so the first rank
    also computes the loss. At most 2 p stage activations are in flight, which is the memory of
    1F1B. For m >= 2 p - 1 and F = I = W there is no bubble.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: not read: it is 2.

    Example:
        >>> for row in rows_v(p=2, m=2, v=2):
        ...     print(*row)
        0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1
        1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
    """
    return tuple(tuple(_row_of_v(rank, p, m)) for rank in range(p))


def _row_of_v(rank: int, p: int, m: int) -> Iterator[Action]:
    """Number the moves; those of micro-batches that are not there fall away."""
    done: Counter[StageMove] = Counter()
    for stage, kind in _moves_of_v(rank, p, max(m, 2 * p - 1)):
        i = done[stage, kind]
        done[stage, kind] += 1
        if i < m:
            yield Action(stage, kind, i)


def _moves_of_v(rank: int, p: int, m: int) -> Iterator[StageMove]:
    """The moves of one rank for m >= 2 p - 1 micro-batches, which fill the pipeline."""
    down, up = rank, 2 * p - 1 - rank
    forward_down, forward_up = (down, Kind.FORWARD), (up, Kind.FORWARD)
    input_down, input_up = (down, Kind.INPUT_GRAD), (up, Kind.INPUT_GRAD)
    weight_down, weight_up = (down, Kind.WEIGHT_GRAD), (up, Kind.WEIGHT_GRAD)
    turn = (forward_up, input_up, weight_up)
    ahead = 2 * p - 1 - rank  # forwards on the way down before the first backward there
    yield from [forward_down] * (ahead - rank)
    yield from [forward_up, forward_down] * rank
    yield from turn * (p - rank)
    yield from (forward_down, input_down, weight_down, *turn) * (m - ahead)
    yield from (input_down, weight_down, *turn) * (ahead - p)
    yield from [input_down, input_up] * rank
    yield from [input_down, weight_down] * (p - rank)
    yield from [weight_up] * rank
    yield from [weight_down] * rank


def _makespan_h1(x: Pipes) -> Floats:
    """(p - 1) max(F + I - W, F, I), W as far as there are micro-batches to fill it."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    full = np.minimum(x.filled, 1.0)
    return with_bubble(x, (x.p - 1) * largest((F + I - full * W, F, I)))


def _makespan_h2(x: Pipes) -> Floats:
    """(p - 1) max(F + I - 2 W, F, I - F) from 2 p - 1 micro-batches on."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    full = np.clip(x.filled, 0.0, 2.0)
    ahead = np.maximum(full - 1, 0.0)
    return with_bubble(x, (x.p - 1) * largest((F + I - full * W, F, I - ahead * F)))


def _makespan_v(x: Pipes) -> Floats:
    """(p - 1) max(2 I - 2 W, I, 2 F - I, 2 F - 2 W) from 2 p - 1 micro-batches on."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    full = np.clip(x.filled - 1, 0.0, 1.0)
    fewer = np.clip(1 - x.filled, 0.0, 1.0)  # micro-batches than ranks
    early = 2 * fewer * F + 2 * I - 2 * full * W
    late = np.where(full > 0, 2 * F - full * np.minimum(I, 2 * W), 0.0)
    return with_bubble_of_v(x, (x.p - 1) * largest((early, I, late)))


def _in_flight_h1(x: Peaks) -> Integers:
    return smallest((x.p, x.m))


def _in_flight_h2(x: Peaks) -> Integers:
    return smallest((2 * x.p - 1, x.m))


def _in_flight_v(x: Peaks) -> Integers:
    return smallest((2 * x.p, 2 * x.m, x.m + x.rank + 1))


def _idle_h1(p: int, v: int, seconds: PassSeconds) -> float:
    return (p - 1) * (seconds.F + seconds.I - seconds.W)


def _idle_h2(p: int, v: int, seconds: PassSeconds) -> float:
    return (p - 1) * (seconds.F + seconds.I - 2 * seconds.W)


def _idle_v(p: int, v: int, seconds: PassSeconds) -> float:
    if not seconds.F == seconds.I == seconds.W:
        raise RefusedError(
            f"the formula of zb-v is for F = I = W only, not {seconds.F:g}, {seconds.I:g}, "
            f"{seconds.W:g}; simulate it"
        )
    return 0.0


ZB_H1 = ScheduleSpec(
    name="zb-h1",
    title="ZB-H1",
    description="weight gradients fill the idle time, in the memory of 1F1B",
    source="Qi et al. 2024 (arXiv:2401.10241), section 2 and table 2",
    rows=rows_h1,
    placement=looped,
    splits_backward=True,
    makespan=_makespan_h1,
    error=0.025,
    in_flight=_in_flight_h1,
    bubble=PaperBubble("(p-1) (F+I-W)", _idle_h1),
)
ZB_H2 = ScheduleSpec(
    name="zb-h2",
    title="ZB-H2",
    description="weight gradients fill the idle time wholly, in twice the memory of 1F1B",
    source="Qi et al. 2024 (arXiv:2401.10241), section 2 and table 2",
    rows=rows_h2,
    placement=looped,
    splits_backward=True,
    makespan=_makespan_h2,
    error=0.025,
    in_flight=_in_flight_h2,
    bubble=PaperBubble("(p-1) (F+I-2W)", _idle_h2),
)
ZB_V = ScheduleSpec(
    name="zb-v",
    title="ZB-V",
    description="stages in a V: no bubble where F = I = W, in the memory of 1F1B",
    source="Qi et al. 2024 (arXiv:2401.10241), section 6; Qi et al. 2024 (arXiv:2405.15362)",
    rows=rows_v,
    placement=folded,
    chunks=TWO,
    splits_backward=True,
    makespan=_makespan_v,
    error=0.025,
    in_flight=_in_flight_v,
    bubble=PaperBubble("0 where F = I = W", _idle_v),
)
