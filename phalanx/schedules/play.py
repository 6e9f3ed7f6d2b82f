"""Play a schedule against a clock: every action starts as soon as it can.

This one loop finds deadlocks, orders messages and predicts time, because all three ask the
same question: what must have happened before an action can start?
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Kind, Schedule

Costs = Mapping[Kind, float | Sequence[float]]

UNIT: Costs = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 1}


def play(schedule: Schedule, costs: Costs = UNIT, hop: float = 0.0) -> list[list[float]]:
    """Start every action as soon as its rank is free and its inputs have arrived.

    Args:
        schedule: rows of computing actions, without messages and reductions.
        costs: seconds of each kind of action, as one number or one per stage.
        hop: seconds to carry one tensor to another rank.

    Returns:
        The starting time of every action, in rows of the same shape.

    Raises:
        ScheduleError: some rank waits for ever; the message says which, and before what.

    Example:
        >>> from phalanx.schedules.build import build
        >>> play(build("gpipe", p=2, m=1), {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}, hop=0.5)
        [[0.0, 5.0], [1.5, 2.5]]
    """
    game = _Play(schedule, costs, hop)
    game.run()
    stuck = [
        f"rank {rank} before {row[len(begun)]}"
        for rank, (row, begun) in enumerate(zip(schedule.rows, game.starts, strict=True))
        if len(begun) < len(row)
    ]
    if stuck:
        raise ScheduleError(f"deadlock: {', '.join(stuck)}; reorder the rows of these ranks")
    return game.starts


def seconds_table(schedule: Schedule, costs: Costs) -> dict[Kind, Sequence[float]]:
    """The seconds of each kind of action on each stage; kinds without a cost take none.

    Args:
        schedule: whose stages there are.
        costs: seconds of a kind, as one number or one per stage.
    """
    n = schedule.num_stages
    table: dict[Kind, Sequence[float]] = dict.fromkeys(Kind, (0.0,) * n)
    for kind, cost in costs.items():
        table[kind] = (cost,) * n if isinstance(cost, int | float) else cost
    return table


FORWARD, WEIGHT_GRAD = Kind.FORWARD, Kind.WEIGHT_GRAD  # looking up members of an Enum is slow


class _Play:
    """The state of one play: what has been made so far, and who waits for what.

    Tensors are numbered: the output of stage s for micro-batch i is s m + i, and the gradient
    of its input comes as many places behind it as there are outputs.
    """

    def __init__(self, schedule: Schedule, costs: Costs, hop: float) -> None:
        self.schedule = schedule
        self.seconds = seconds_table(schedule, costs)
        self.hop = hop
        self.made = [-1.0] * (2 * schedule.num_stages * schedule.m)  # tensor: when; not yet
        self.waiting: dict[int, list[int]] = {}  # tensor: ranks
        self.ready = deque(range(len(schedule.rows)))
        self.starts: list[list[float]] = [[] for _ in schedule.rows]

    def run(self) -> None:
        """Let every rank go on until it waits, and wake it when its tensor is made."""
        ranks = [self._live(rank) for rank in range(len(self.starts))]
        while self.ready:
            rank = self.ready.popleft()
            tensor = next(ranks[rank], None)
            if tensor is not None:
                self.waiting.setdefault(tensor, []).append(rank)

    def _live(self, rank: int) -> Iterator[int]:
        """Do the row of one rank; yield whatever it has to wait for.

        What a stage made itself is there once its rank is free, if it comes before at all.
        """
        schedule, seconds, starts = self.schedule, self.seconds, self.starts[rank]
        made, waiting = self.made, self.waiting
        away = [0.0 if holder == rank else self.hop for holder in schedule.ranks]
        depth, m, gradients = schedule.depth, schedule.m, schedule.num_stages * schedule.m
        now = 0.0
        for stage, kind, i in schedule.rows[rank]:
            output = stage * m + i
            own = neighbour = beside = -1
            if kind is FORWARD:
                makes = output
                if stage % depth:
                    neighbour, beside = output - m, stage - 1
            elif kind is WEIGHT_GRAD:
                own, makes = output + gradients, -1
            else:
                own, makes = output, output + gradients
                if (stage + 1) % depth:
                    neighbour, beside = makes + m, stage + 1
            if own >= 0 and made[own] < 0:
                yield own
            if neighbour >= 0:
                if made[neighbour] < 0:
                    yield neighbour
                now = max(now, made[neighbour] + away[beside])
            starts.append(now)
            now += seconds[kind][stage]
            if makes >= 0:
                made[makes] = now
                if makes in waiting:
                    self.ready += waiting.pop(makes)
