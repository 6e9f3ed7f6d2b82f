"""What there is to know about a schedule, as one value: all rooms ask it, and nothing else.

Symbols: p pipeline ranks, m micro-batches per step, v chunks of layers per rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.core.errors import RefusedError, ScheduleError, UsageError
from phalanx.core.schedule import Row, Schedule
from phalanx.schedules.bubble import UNIT, Bubble, PaperBubble, PassSeconds
from phalanx.schedules.formulas import Floats, Integers, Peaks, Pipes
from phalanx.schedules.placement import Placement
from phalanx.schedules.sizes import ANY, ONE, Sizes, any_number

MOST_PASSES = 10_000_000  # of gigabytes; a step of more is priced by its period


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """A schedule: its rows, its placement, the sizes it takes, and its formulas.

    Only `rows` and `placement` are needed to draw, check, prove and train. `estimate` plays the
    rows; the search asks the formulas.

    Attributes:
        name: what a layout calls it.
        title: what people call it.
        description: one line.
        source: paper and section, or program.
        rows: from p, m and v, one ordered row of computing actions for each rank.
        placement: from p and v, the rank of each stage.
        ranks: the p that it takes.
        micro_batches: from p, the m that it takes.
        chunks: the v that it takes; one that is not fixed is left to the layout.
        splits_backward: whether rows have I and W in the place of some B.
        asynchronous: whether every backward moves the weights, rather than all of a step together.
        makespan: seconds from the first forward to the last backward, by column; None where the
            search has to leave the schedule out.
        error: of `makespan` against the played schedule, at most, where stages cost the same,
            m is a multiple of p and at least 2 p, and nothing is carried.
        in_flight: micro-batches whose activations a rank holds at its peak, counted per stage, by
            column and exact; goes with `makespan`.
        bubble: what its paper says about idle time, if it does.
    """

    name: str
    title: str
    description: str
    source: str
    rows: Callable[[int, int, int], tuple[Row, ...]]
    placement: Callable[[int, int], Placement]
    ranks: Sizes = ANY
    micro_batches: Callable[[int], Sizes] = any_number
    chunks: Sizes = ONE
    splits_backward: bool = False
    asynchronous: bool = False
    makespan: Callable[[Pipes], Floats] | None = None
    error: float = 0.0
    in_flight: Callable[[Peaks], Integers] | None = None
    bubble: PaperBubble | None = None

    @property
    def can_be_searched(self) -> bool:
        """Whether it is another order of the same update, with formulas for both its prices."""
        return not self.asynchronous and None not in (self.makespan, self.in_flight)

    def build(self, p: int, m: int, v: int | None = None) -> Schedule:
        """The rows for these sizes, with all that belongs to them.

        Args:
            p: pipeline ranks.
            m: micro-batches per step.
            v: chunks of layers per rank; None for as few as the schedule can have.

        Raises:
            UsageError: a size is below 1, or the rows would be too many to write out.
            RefusedError: the schedule cannot be had in these sizes.
            ScheduleError: ordering the work failed.
        """
        v = self.chunks.least if v is None else v
        require_positive(p, m, v)
        if p * m * v > MOST_PASSES:
            raise UsageError(
                f"p={p} m={m} v={v} are {p * m * v:.3g} passes through a stage; a schedule that is "
                f"written out has at most {MOST_PASSES:,}"
            )
        self.refuse(p, m, v)
        where = self.placement(p, v)
        stages = len(where.ranks) // p
        return Schedule(self.name, p, m, stages, self._rows(p, m, v), where.ranks, where.copies)

    def _rows(self, p: int, m: int, v: int) -> tuple[Row, ...]:
        """The rows; of a schedule from elsewhere, whatever goes wrong in it is its own fault."""
        try:
            return self.rows(p, m, v)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ScheduleError(
                f"schedule {self.name} cannot order p={p} m={m} v={v}: {what}; mend its rows"
            ) from error

    def refuse(self, p: int, m: int, v: int) -> None:
        """Raise RefusedError where the schedule cannot be had in these sizes.

        Args:
            p: pipeline ranks.
            m: micro-batches per step.
            v: chunks of layers per rank.

        Raises:
            RefusedError: a size that it does not take, with those that it does.
        """
        for key, size, sizes, given in (
            ("p", p, self.ranks, ""),
            ("v", v, self.chunks, ""),
            ("m", m, self.micro_batches(p), f" on p={p} ranks"),
        ):
            if not sizes.hold(size):
                raise RefusedError(
                    f"{self.name}{given} needs {key} to be {sizes}, not {key}={size}; "
                    f"{key} can be {sizes.nearest(size)}"
                )

    def bubble_of(
        self, p: int, m: int, seconds: PassSeconds = UNIT, v: int | None = None
    ) -> Bubble:
        """Idle and working seconds of a rank by the paper's formula; see `bubble`.

        Args:
            p: pipeline ranks.
            m: micro-batches per step; the formula supposes enough of them to fill the pipeline.
            seconds: of the passes of one micro-batch on one rank.
            v: chunks of layers per rank; None for as few as the schedule can have.

        Raises:
            UsageError: a count is below 1.
            RefusedError: the paper has no formula, or none for these numbers.
        """
        v = self.chunks.least if v is None else v
        require_positive(p, m, v)
        if self.bubble is None:
            raise RefusedError(f"no paper has a bubble formula for {self.name}; simulate it")
        self.refuse(p, self.micro_batches(p).fewest(m), v)
        idle = self.bubble.idle(p, v, seconds)
        return Bubble(idle=max(idle, 0.0), work=m * (seconds.F + seconds.B))

    def peak_in_flight(self, p: int, m: int, v: int) -> tuple[int, ...]:
        """Micro-batches whose activations each rank holds at its peak, counted per stage.

        Args:
            p: pipeline ranks.
            m: micro-batches per step.
            v: chunks of layers per rank.

        Raises:
            RefusedError: there is no formula; `simulate.peak_in_flight` counts the rows.
        """
        if self.in_flight is None:
            raise RefusedError(f"{self.name} has no formula of what it holds; count its rows")
        rank = np.arange(p, dtype=np.int64)
        ps, ms, vs = (np.full(p, size, dtype=np.int64) for size in (p, m, v))
        return tuple(int(n) for n in self.in_flight(Peaks(ps, ms, vs, rank)))


def require_positive(p: int, m: int, v: int) -> None:
    """Raise UsageError where a size of a schedule is below 1.

    Args:
        p: pipeline ranks.
        m: micro-batches per step.
        v: chunks of layers per rank.

    Raises:
        UsageError: it is below 1.
    """
    for name, size in (("p", p), ("m", m), ("v", v)):
        if size < 1:
            raise UsageError(f"{name}={size}; a schedule needs {name} of at least 1")
