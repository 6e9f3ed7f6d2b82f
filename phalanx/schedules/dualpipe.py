"""DualPipe: micro-batches enter the pipeline at both ends, and each forward meets a backward.

Symbols: p pipeline ranks, m micro-batches, F, I, W the seconds of a forward, an input gradient
and a weight gradient; B = I + W. Every rank has two stages: a near one, where the micro-batches
of its own end come early, and a far one, which they reach late or which the other end feeds.
Sources: DeepSeek-V3 (arXiv:2412.19437), section 3.2.1 and table 2, and the schedule that its
authors published with it, where also DualPipeV is. A pair of F and B that they run at the same
time, to hide the messages of one behind the other, stands here as F, then B.
"""

from collections import Counter, deque
from collections.abc import Iterator

from phalanx.core.schedule import Action, Kind, Row
from phalanx.schedules.bubble import PaperBubble, PassSeconds
from phalanx.schedules.formulas import Floats, Integers, Peaks, Pipes, largest, with_bubble_of_v
from phalanx.schedules.placement import doubled, folded
from phalanx.schedules.sizes import TWO, Sizes
from phalanx.schedules.spec import ScheduleSpec

NEAR, FAR = 0, 1
PlacedMove = tuple[int, Kind]  # NEAR or FAR, and what is done there next

F_NEAR, F_FAR = (NEAR, Kind.FORWARD), (FAR, Kind.FORWARD)
B_NEAR, B_FAR = (NEAR, Kind.BACKWARD), (FAR, Kind.BACKWARD)
I_NEAR, I_FAR = (NEAR, Kind.INPUT_GRAD), (FAR, Kind.INPUT_GRAD)
W_OLDEST = (NEAR, Kind.WEIGHT_GRAD)  # of whichever stage owes one for the longest time


def rows(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches, half of them from each end, over `p` ranks.

    Every rank holds two of the p stages, so the model is there twice: stages p to 2 p - 1 are
    the second copy, on the ranks in reverse. At most p + 1 micro-batches are in flight. The
    worst rank idles for (p/2 - 1)(F + I - W) between its first and last action where
    W <= I <= F <= B. The paper's (p/2 - 1)(F&B + B - 3 W) is for pairs of F and B that last
    F&B as one action.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: not read: it is 1, in each copy of the model.
    """
    found = []
    for rank in range(p):
        ours, theirs = (rank, 0), (2 * p - 1 - rank, m // 2)  # stage, its first micro-batch
        near, far = (ours, theirs) if rank < p // 2 else (theirs, ours)
        moves = _moves(min(rank, p - 1 - rank), p // 2, m // 2)
        found.append(tuple(_numbered(moves, near, far)))
    return tuple(found)


def rows_v(p: int, m: int, v: int) -> tuple[Row, ...]:
    """Order the work of `m` micro-batches over `p` ranks whose two stages form a V.

    Half of DualPipe: 2 p stages on p ranks, each stage once. At most 2 p + 1 stage activations
    are in flight. The worst rank idles for (p - 1)(F + I - W) between its first and last action
    where W <= I <= F <= B.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: not read: it is 2.
    """
    return tuple(
        tuple(_numbered(_moves(rank, p, m), (rank, 0), (2 * p - 1 - rank, 0))) for rank in range(p)
    )


def _moves(rank: int, half: int, m: int) -> Iterator[PlacedMove]:
    """The moves of the rank that is `rank` ranks away from its end; the middle is at `half`."""
    behind = half - 1 - rank
    yield from [F_NEAR] * (2 * behind)
    yield from [F_NEAR, F_FAR] * (rank + 1)
    yield from [I_FAR, W_OLDEST, F_FAR] * behind
    yield from [F_NEAR, B_FAR, F_FAR, B_NEAR] * (m - 2 * half + rank + 1)
    yield from [B_FAR, F_FAR, B_NEAR] * behind
    last = [B_FAR, B_NEAR] * (rank + 1)
    split = [I_FAR, I_NEAR] * (rank + 1)  # half of the last backwards keep their W for the end
    yield from last[: rank + 1] + split[rank + 1 :]
    yield from [W_OLDEST, I_NEAR] * behind
    yield from [W_OLDEST] * (rank + 1)


def _numbered(
    moves: Iterator[PlacedMove], near: tuple[int, int], far: tuple[int, int]
) -> Iterator[Action]:
    """Turn moves into actions; `near` and `far` are (stage, its first micro-batch)."""
    forwards, backwards, owed = Counter[int](), Counter[int](), deque[Action]()
    for place, kind in moves:
        if kind is Kind.WEIGHT_GRAD:
            yield owed.popleft()
            continue
        stage, first = (near, far)[place]
        done = forwards if kind is Kind.FORWARD else backwards
        action = Action(stage, kind, first + done[stage])
        done[stage] += 1
        yield action
        if kind is Kind.INPUT_GRAD:
            owed.append(Action(stage, Kind.WEIGHT_GRAD, action.microbatch))


def _micro_batches(p: int) -> Sizes:
    return Sizes(least=2 * p, multiple=2)


def _micro_batches_v(p: int) -> Sizes:
    return Sizes(least=2 * p)


def _makespan(x: Pipes) -> Floats:
    """max[(p/2 - 1)(F + I - W), (p/2 - 1) F, (p - 2) I - F - (p/2 - 1) W]."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    half = x.p / 2 - 1
    return with_bubble_of_v(x, largest((half * (F + I - W), half * F, half * (2 * I - W) - F)))


def _makespan_v(x: Pipes) -> Floats:
    """max[(p - 1)(F + I - W), (p - 1) F, 2 (p - 1) I - F - (p - 1) W]."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    less = x.p - 1
    return with_bubble_of_v(x, largest((less * (F + I - W), less * F, less * (2 * I - W) - F)))


def _in_flight(x: Peaks) -> Integers:
    return x.p + 1


def _in_flight_v(x: Peaks) -> Integers:
    return 2 * x.p + 1


def _idle(p: int, v: int, seconds: PassSeconds) -> float:
    return (p / 2 - 1) * (seconds.both + seconds.B - 3 * seconds.W)


DUALPIPE = ScheduleSpec(
    name="dualpipe",
    title="DualPipe",
    description="micro-batches enter at both ends of two copies of the model",
    source="DeepSeek-V3 (arXiv:2412.19437), section 3.2.1 and table 2",
    rows=rows,
    placement=doubled,
    ranks=Sizes(least=2, multiple=2),
    micro_batches=_micro_batches,
    splits_backward=True,
    makespan=_makespan,
    error=0.025,
    in_flight=_in_flight,
    bubble=PaperBubble("(p/2-1) (F&B+B-3W)", _idle),
)
DUALPIPEV = ScheduleSpec(
    name="dualpipev",
    title="DualPipeV",
    description="half of DualPipe, stages in a V: one copy of the model",
    source="DeepSeek-AI 2025 (github.com/deepseek-ai/DualPipe), DualPipeV",
    rows=rows_v,
    placement=folded,
    micro_batches=_micro_batches_v,
    chunks=TWO,
    splits_backward=True,
    makespan=_makespan_v,
    error=0.025,
    in_flight=_in_flight_v,
    bubble=PaperBubble("(p/2-1) (F&B+B-3W)", _idle),
)
