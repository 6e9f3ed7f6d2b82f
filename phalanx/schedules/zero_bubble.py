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

from phalanx.core.schedule import Action, Kind, Schedule

Move = tuple[int, Kind]  # a stage and what it does next; micro-batches are counted later


def zb_h1(p: int, m: int) -> Schedule:
    """Order the work of `m` micro-batches over `p` ranks, in the memory of 1F1B.

    Every rank holds min(p, m) micro-batches in flight, as the first rank of 1F1B does. For
    m >= p and W <= F, W <= I, the bubble is (p - 1)(F + I - W): a third of 1F1B's if F = I = W.
    """
    rows = tuple(tuple(_row(stage, m, p - 1 - stage, stage)) for stage in range(p))
    return Schedule("zb-h1", p, m, 1, rows, ranks=tuple(range(p)))


def zb_h2(p: int, m: int) -> Schedule:
    """Order the work of `m` micro-batches over `p` ranks, in about twice the memory of 1F1B.

    Every rank holds min(2 p - 1, m) micro-batches in flight. For m >= 2 p - 1 and W <= F,
    W <= I, the bubble is (p - 1)(F + I - 2 W): none if F = I = W.
    """
    rows = tuple(tuple(_row(stage, m, 2 * (p - 1 - stage), 2 * stage)) for stage in range(p))
    return Schedule("zb-h2", p, m, 1, rows, ranks=tuple(range(p)))


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


def zb_v(p: int, m: int) -> Schedule:
    """Order the work of `m` micro-batches over `p` ranks whose two stages form a V.

    Rank r holds stage r on the way down and stage 2 p - 1 - r on the way up, so the first rank
    also computes the loss. At most 2 p stage activations are in flight, which is the memory of
    1F1B. For m >= 2 p - 1 and F = I = W there is no bubble.
    """
    rows = tuple(tuple(_row_of_v(rank, p, m)) for rank in range(p))
    return Schedule("zb-v", p, m, 2, rows, ranks=(*range(p), *reversed(range(p))))


def _row_of_v(rank: int, p: int, m: int) -> Iterator[Action]:
    """Number the moves; those of micro-batches that are not there fall away."""
    done: Counter[Move] = Counter()
    for stage, kind in _moves_of_v(rank, p, max(m, 2 * p - 1)):
        i = done[stage, kind]
        done[stage, kind] += 1
        if i < m:
            yield Action(stage, kind, i)


def _moves_of_v(rank: int, p: int, m: int) -> Iterator[Move]:
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
