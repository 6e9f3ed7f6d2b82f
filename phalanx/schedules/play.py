"""Play a schedule against a clock: every action starts as soon as it can.

This one loop finds deadlocks, orders messages and predicts time, because all three ask the
same question: what must have happened before an action can start?
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from phalanx.core.errors import ScheduleError
from phalanx.core.schedule import Action, Kind, Schedule

Costs = Mapping[Kind, float | Sequence[float]]
Tensor = tuple[int, int, int]  # (OUTPUT or GRADIENT, stage, micro-batch): what others wait for

OUTPUT = 0  # of a stage: the next stage's input
GRADIENT = 1  # of a stage's input: what the previous stage continues with

UNIT: Costs = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 1}


def play(schedule: Schedule, costs: Costs = UNIT, hop: float = 0.0) -> list[list[float]]:
    """Start every action as soon as its rank is free and its inputs have arrived.

    Args:
        schedule: the rows; messages and reductions in them take no time.
        costs: seconds of each kind of action, as one number or one per stage.
        hop: seconds to carry one tensor to another rank.

    Returns:
        The starting time of every action, in rows of the same shape.

    Raises:
        ScheduleError: some rank waits for ever; the message says which, and before what.
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


class _Play:
    """The state of one play: what has been made so far, and who waits for what."""

    def __init__(self, schedule: Schedule, costs: Costs, hop: float) -> None:
        self.schedule = schedule
        self.seconds = seconds_table(schedule, costs)
        self.hop = hop
        self.made: dict[Tensor, tuple[float, int]] = {}  # when, and on which rank
        self.waiting: dict[Tensor, list[int]] = {}
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

    def _live(self, rank: int) -> Iterator[Tensor]:
        """Do the row of one rank; yield whatever it has to wait for."""
        now, num_stages = 0.0, self.schedule.num_stages
        made, waiting, starts = self.made, self.waiting, self.starts[rank]
        for action in self.schedule.rows[rank]:
            for tensor in needs(action, num_stages):
                if tensor not in made:
                    yield tensor
                at, maker = made[tensor]
                if maker != rank:
                    at += self.hop
                now = max(now, at)
            starts.append(now)
            now += self.seconds[action.kind][action.stage]
            output = makes(action)
            if output is not None:
                made[output] = now, rank
                if output in waiting:
                    self.ready += waiting.pop(output)


def seconds_table(schedule: Schedule, costs: Costs) -> dict[Kind, Sequence[float]]:
    """The seconds of each kind of action on each stage; kinds without a cost take none."""
    n = schedule.num_stages
    table: dict[Kind, Sequence[float]] = dict.fromkeys(Kind, (0.0,) * n)
    for kind, cost in costs.items():
        table[kind] = (cost,) * n if isinstance(cost, int | float) else cost
    return table


def needs(action: Action, num_stages: int) -> tuple[Tensor, ...]:
    """The tensors that must exist before `action` can start."""
    stage, kind, i = action
    if kind is Kind.FORWARD:
        return ((OUTPUT, stage - 1, i),) if stage > 0 else ()
    if kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
        own = (OUTPUT, stage, i)
        return (own, (GRADIENT, stage + 1, i)) if stage + 1 < num_stages else (own,)
    if kind is Kind.WEIGHT_GRAD:
        return ((GRADIENT, stage, i),)
    return ()


def makes(action: Action) -> Tensor | None:
    """The tensor that others may wait for, if `action` makes one."""
    stage, kind, i = action
    if kind is Kind.FORWARD:
        return OUTPUT, stage, i
    if kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
        return GRADIENT, stage, i
    return None
