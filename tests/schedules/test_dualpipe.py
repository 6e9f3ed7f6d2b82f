import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RefusedError
from phalanx.core.schedule import Action, Schedule
from phalanx.schedules.check import check
from phalanx.schedules.dualpipe import DUALPIPE, DUALPIPEV


@given(half=st.integers(1, 4), extra=st.integers(0, 6))
def test_dualpipe_is_complete_and_free_of_deadlock(half, extra):
    p = 2 * half
    schedule = DUALPIPE.build(p, 2 * p + 2 * extra)
    check(schedule)
    assert [schedule.stages_of(rank) for rank in range(p)] == [
        (rank, 2 * p - 1 - rank) for rank in range(p)
    ]


@given(p=st.integers(1, 6), extra=st.integers(0, 6))
def test_dualpipev_is_complete_and_free_of_deadlock(p, extra):
    check(DUALPIPEV.build(p, 2 * p + extra))


@given(half=st.integers(1, 4), extra=st.integers(0, 6))
def test_the_two_ends_of_dualpipe_do_the_same_with_their_own_micro_batches(half, extra):
    p, m = 2 * half, 4 * half + 2 * extra
    rows = DUALPIPE.build(p, m).rows
    for rank in range(p):
        mirrored = [(stage - p) % (2 * p) for stage, _, _ in rows[rank]]
        assert [a.stage for a in rows[p - 1 - rank]] == mirrored
        assert [a.microbatch for a in rows[p - 1 - rank]] == [
            (a.microbatch + m // 2) % m for a in rows[rank]
        ]


def test_dualpipev_is_one_half_of_dualpipe_unfolded():
    for rank in range(2):
        near, far = rank, 7 - rank  # the stages of DualPipe on 4 ranks
        unfolded = [
            Action(rank if a.stage == near else 3 - rank, a.kind, a.microbatch % 5)
            for a in DUALPIPE.build(4, 10).rows[rank]
            if a.stage in (near, far)
        ]
        assert tuple(unfolded) == DUALPIPEV.build(2, 5).rows[rank]


@pytest.mark.parametrize(
    ("p", "m", "works"),
    [
        (3, 8, "p can be 2 or 4"),
        (1, 8, "p can be 2"),
        (4, 9, "m can be 8 or 10"),
        (4, 6, "m can be 8"),
    ],
)
def test_sizes_that_dualpipe_cannot_have_are_refused_with_what_works(p, m, works):
    with pytest.raises(RefusedError, match=f"{works}$"):
        DUALPIPE.build(p, m)


def test_dualpipev_needs_two_micro_batches_per_rank():
    with pytest.raises(RefusedError, match="m to be at least 8, not m=7; m can be 8"):
        DUALPIPEV.build(4, 7)


def _units(schedule: Schedule, rank: int, half: int, m: int) -> list[tuple[Action, ...]]:
    """The row with its pairs of F and B put together, as table 2 of the report counts them.

    `rank` is counted from the end and `m` from one end; the first pair in the middle runs apart.
    """
    behind = half - 1 - rank
    row = iter(schedule.rows[rank])
    alone = 2 * behind + 2 * (rank + 1) + 3 * behind
    pattern = [1] * alone + [2, 2] * (m - 2 * half + rank + 1) + [1, 2] * behind
    if rank == half - 1:
        pattern[alone : alone + 1] = [1, 1]
    units = [tuple(next(row) for _ in range(size)) for size in pattern]
    return [*units, *((action,) for action in row)]


@given(p=st.integers(1, 6), extra=st.integers(0, 5))
def test_pairs_that_run_as_one_action_give_the_bubble_of_the_report(p, extra):
    # (PP/2 - 1)(F&B + B - 3 W) with F = I = W = 1, F&B = F + B = 3, and p = PP/2 ranks of a V.
    schedule = DUALPIPEV.build(p, 2 * p + extra)
    rows = [_units(schedule, rank, p, schedule.m) for rank in range(p)]
    assert max(_idle(rows, schedule)) == (p - 1) * (3 + 2 - 3)


def _idle(rows: list[list[tuple[Action, ...]]], schedule: Schedule) -> list[int]:
    """Plays units of one or two actions, whose outputs appear when the whole unit ends."""
    seconds = {"F": 1, "B": 2, "I": 1, "W": 1}
    ended: dict[tuple[str, int, int], int] = {}
    free, worked, first = [0] * len(rows), [0] * len(rows), [-1] * len(rows)
    queues = [list(row) for row in rows]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(key in ended for a in queue[0] for key in _needs(a, schedule)):
                unit = queue.pop(0)
                ready = [ended[key] for a in unit for key in _needs(a, schedule)]
                start = max([free[rank], *ready])
                first[rank] = start if first[rank] < 0 else first[rank]
                lasts = sum(seconds[a.kind.value] for a in unit)
                free[rank], worked[rank] = start + lasts, worked[rank] + lasts
                for stage, kind, i in unit:
                    made = {"F": "F", "B": "G", "I": "G", "W": "W"}[kind.value]
                    ended[made, stage, i] = free[rank]
    return [free[r] - first[r] - worked[r] for r in range(len(rows))]


def _needs(action: Action, schedule: Schedule) -> list[tuple[str, int, int]]:
    stage, kind, i = action
    if kind.value == "F":
        return [("F", stage - 1, i)] if stage else []
    if kind.value == "W":
        return [("G", stage, i)]
    last = stage == schedule.num_stages - 1
    return [("F", stage, i)] if last else [("F", stage, i), ("G", stage + 1, i)]
