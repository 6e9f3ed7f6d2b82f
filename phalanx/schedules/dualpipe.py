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

from phalanx.core.errors import RefusedError
from phalanx.core.schedule import Action, Kind, Schedule

NEAR, FAR = 0, 1
Move = tuple[int, Kind]  # NEAR or FAR, and what is done there next

F_NEAR, F_FAR = (NEAR, Kind.FORWARD), (FAR, Kind.FORWARD)
B_NEAR, B_FAR = (NEAR, Kind.BACKWARD), (FAR, Kind.BACKWARD)
I_NEAR, I_FAR = (NEAR, Kind.INPUT_GRAD), (FAR, Kind.INPUT_GRAD)
W_OLDEST = (NEAR, Kind.WEIGHT_GRAD)  # of whichever stage owes one for the longest time


def dualpipe(p: int, m: int) -> Schedule:
    """Order the work of `m` micro-batches, half of them from each end, over `p` ranks.

    Every rank holds two of the p stages, so the model is there twice: stages p to 2 p - 1 are
    the second copy, on the ranks in reverse. At most p + 1 micro-batches are in flight. The
    worst rank idles for (p/2 - 1)(F + I - W) between its first and last action where
    W <= I <= F <= B. The paper's (p/2 - 1)(F&B + B - 3 W) is for pairs of F and B that last
    F&B as one action.

    Raises:
        RefusedError: p or m is odd, or m is below 2 p.
    """
    if p % 2:
        raise RefusedError(f"dualpipe pairs its ranks, but p={p} is odd; p can be {_even(p)}")
    if m % 2 or m < 2 * p:
        raise RefusedError(
            f"dualpipe on p={p} ranks needs an even m of at least {2 * p}, not m={m}; "
            f"m can be {max(m + m % 2, 2 * p)}"
        )
    rows = []
    for rank in range(p):
        ours, theirs = (rank, 0), (2 * p - 1 - rank, m // 2)  # stage, its first micro-batch
        near, far = (ours, theirs) if rank < p // 2 else (theirs, ours)
        moves = _moves(min(rank, p - 1 - rank), p // 2, m // 2)
        rows.append(tuple(_numbered(moves, near, far)))
    ranks = (*range(p), *reversed(range(p)))
    return Schedule("dualpipe", p, m, 2, tuple(rows), ranks, copies=2)


def dualpipev(p: int, m: int) -> Schedule:
    """Order the work of `m` micro-batches over `p` ranks whose two stages form a V.

    Half of DualPipe: 2 p stages on p ranks, each stage once. At most 2 p + 1 stage activations
    are in flight. The worst rank idles for (p - 1)(F + I - W) between its first and last action
    where W <= I <= F <= B.

    Raises:
        RefusedError: m is below 2 p.
    """
    if m < 2 * p:
        raise RefusedError(f"dualpipev on p={p} ranks needs m of at least {2 * p}, not m={m}")
    rows = tuple(
        tuple(_numbered(_moves(rank, p, m), (rank, 0), (2 * p - 1 - rank, 0))) for rank in range(p)
    )
    return Schedule("dualpipev", p, m, 2, rows, ranks=(*range(p), *reversed(range(p))))


def _moves(rank: int, half: int, m: int) -> Iterator[Move]:
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
    moves: Iterator[Move], near: tuple[int, int], far: tuple[int, int]
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
            owed.append(action._replace(kind=Kind.WEIGHT_GRAD))


def _even(p: int) -> str:
    return f"{p - 1} or {p + 1}" if p > 1 else "2"
