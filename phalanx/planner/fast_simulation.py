"""How long a schedule takes, without drawing it: the fast twin of `simulate`.

An action waits for two others: the one before it on its rank, and the one on the neighbouring
stage whose tensor it needs. So actions fall into levels, each of which can be computed at once;
levels depend on the schedule only and are kept. A long step is periodic in its middle, so it is
played for two shorter ones and continued on a straight line.

Symbols: p pipeline ranks, m micro-batches, v stages per rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phalanx.core.schedule import Kind, Schedule
from phalanx.schedules.build import build

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

PERIODS = (4, 5)  # of p micro-batches; the middle of a step is periodic after about that many
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


@dataclass(frozen=True)
class Levels:
    """A schedule in the order in which it can be computed.

    Attributes:
        bounds: where each level begins; one more at the end.
        before: the action before it on its rank; the last place stands for none.
        needs: the action on another rank or stage whose tensor it needs.
        crosses: 1 where that one is on another rank.
        cost: the number of its kind times stages, plus its stage.
        ranks: the rank of each stage.
    """

    bounds: tuple[int, ...]
    before: Integers
    needs: Integers
    crosses: Floats
    cost: Integers
    ranks: tuple[int, ...]


def makespans(
    name: str, p: int, m: int, v: int | None, costs: Mapping[Kind, Floats], hops: Floats
) -> Floats:
    """Seconds of the schedule `name` for several sets of costs at once.

    Args:
        name: of the schedule.
        p: pipeline ranks.
        m: micro-batches.
        v: stages per rank; None for as few as it can have.
        costs: seconds of every kind in each set and stage, of shape (sets, stages).
        hops: seconds to carry one tensor to another rank, in each set.

    Raises:
        UsageError: nobody knows the name.
        RefusedError: the schedule cannot be had in these sizes.
    """
    short, long = (n * p for n in PERIODS)
    if m <= long:
        return _play(levels(name, p, m, v), costs, hops)
    short += m % p
    long += m % p
    first = _play(levels(name, p, short, v), costs, hops)
    second = _play(levels(name, p, long, v), costs, hops)
    return first + (m - short) / (long - short) * (second - first)


def _play(order: Levels, costs: Mapping[Kind, Floats], hops: Floats) -> Floats:
    table = np.concatenate([costs[kind] for kind in KINDS], axis=1).T  # (kinds x stages, sets)
    seconds = table[order.cost]
    waits = order.crosses[:, None] * hops
    end = np.zeros((len(order.cost) + 1, len(hops)))
    for first, last in zip(order.bounds[:-1], order.bounds[1:], strict=True):
        ready = end[order.needs[first:last]] + waits[first:last]
        start = np.maximum(end[order.before[first:last]], ready)
        end[first:last] = start + seconds[first:last]
    result: Floats = end.max(axis=0)
    return result


@lru_cache(maxsize=256)
def levels(name: str, p: int, m: int, v: int | None) -> Levels:
    """Sort the actions of a schedule into levels; the last 256 answers are kept.

    Args:
        name: of the schedule.
        p: pipeline ranks.
        m: micro-batches.
        v: stages per rank; None for as few as it can have.

    Raises:
        UsageError: nobody knows the name.
        RefusedError: the schedule cannot be had in these sizes.
    """
    return sort_into_levels(build(name, p, m, v))


def sort_into_levels(schedule: Schedule) -> Levels:
    """Sort the actions of a schedule, which must be one that can be played to its end."""
    numbered = _number(schedule)
    order = np.argsort(numbered.level, kind="stable")
    place = np.empty(len(order) + 1, dtype=np.intp)
    place[order] = np.arange(len(order))
    place[-1] = len(order)
    level = numbered.level[order]
    changes = np.flatnonzero(level[1:] != level[:-1]) + 1
    owners = np.append(np.array(schedule.ranks, dtype=np.intp), -1)
    stage, needs = numbered.stage[order], numbered.needs[order]
    needed_stage = np.append(numbered.stage, -1)[needs]
    return Levels(
        bounds=(0, *changes.tolist(), len(order)),
        before=place[numbered.before[order]],
        needs=place[needs],
        crosses=((needs >= 0) & (owners[needed_stage] != owners[stage])).astype(np.float64),
        cost=numbered.kind[order] * schedule.num_stages + stage,
        ranks=schedule.ranks,
    )


@dataclass(frozen=True)
class _Numbered:
    """The actions of a schedule by number, row after row; -1 stands for none."""

    kind: Integers
    stage: Integers
    before: Integers
    needs: Integers
    level: Integers


def _number(schedule: Schedule) -> _Numbered:
    """Number the actions, find what each waits for, and so its level."""
    m, depth, stages = schedule.m, schedule.depth, schedule.num_stages
    codes = {kind: code for code, kind in enumerate(KINDS)}
    actions = [action for row in schedule.rows for action in row]
    count = len(actions)
    stage = np.fromiter((action[0] for action in actions), np.intp, count)
    kind = np.fromiter((codes[action[1]] for action in actions), np.intp, count)
    micro = np.fromiter((action[2] for action in actions), np.intp, count)
    forward, backward = kind == 0, (kind == 1) | (kind == 2)
    # forward through a stage makes what its place says; backward the same, behind all forwards
    place = np.where(forward, stage, stages + stage) * m + micro
    maker = np.full(2 * stages * m + 1, -1, dtype=np.intp)
    makes = np.flatnonzero(forward | backward)
    maker[place[makes]] = makes
    ahead = np.where(forward & (stage % depth > 0), place - m, -1)
    wanted = np.where(backward & ((stage + 1) % depth > 0), place + m, ahead)
    needs = maker[wanted]
    before = np.arange(count) - 1
    before[np.cumsum([0, *map(len, schedule.rows[:-1])])] = -1
    return _Numbered(kind, stage, before, needs, _level(schedule, needs.tolist()))


def _level(schedule: Schedule, needs: list[int]) -> Integers:
    """The level of every action: one more than the later of the two that it waits for."""
    level = [0] * len(needs)
    ends = np.cumsum([len(row) for row in schedule.rows]).tolist()
    at = [end - len(row) for end, row in zip(ends, schedule.rows, strict=True)]
    last = [0] * len(ends)
    moving = True
    while moving:
        moving = False
        for rank, end in enumerate(ends):
            number, now = at[rank], last[rank]
            while number < end:
                needed = needs[number]
                if needed >= 0:
                    if not level[needed]:
                        break
                    now = max(now, level[needed])
                now += 1
                level[number] = now
                number += 1
            moving = moving or number > at[rank]
            at[rank], last[rank] = number, now
    return np.array(level, dtype=np.intp)
