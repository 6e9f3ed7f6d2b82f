"""A pipeline schedule as data: for each rank, the ordered row of what it does.

Actions are written as torch.distributed.pipelining writes them, stage first: `2F0` is the
forward of micro-batch 0 on stage 2. There is no clock in a schedule.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action does. The first four compute; the rest is added by `lower`."""

    FORWARD = "F"
    BACKWARD = "B"  # both halves at once
    INPUT_GRAD = "I"  # the half that the previous stage waits for
    WEIGHT_GRAD = "W"  # the half that only the optimizer waits for
    SEND_FORWARD = "SEND_F"  # this stage's output, to the next stage
    RECV_FORWARD = "RECV_F"  # this stage's input, from the previous stage
    SEND_BACKWARD = "SEND_B"  # the gradient of this stage's input, to the previous stage
    RECV_BACKWARD = "RECV_B"  # the gradient of this stage's output, from the next stage
    REDUCE = "REDUCE"  # what the next backward leaves is final: reduce it as it appears

    # There is one object of each kind; Enum would hash its name, in Python, for every look-up.
    __hash__ = object.__hash__

    @property
    def computes(self) -> bool:
        """Whether the action uses the device, rather than the network."""
        return self in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


class Action(NamedTuple):
    """One unit of work on one stage for one micro-batch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """In torch's text form: `2F0`."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """The rows of all ranks of one pipeline.

    Example:
        >>> from phalanx.schedules.build import build
        >>> build("1f1b", p=2, m=2).texts()
        [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1B0', '1F1', '1B1']]

    Attributes:
        name: how the command line calls it.
        p: pipeline ranks.
        m: micro-batches per step.
        v: stages per rank.
        rows: one ordered row of actions per rank.
        ranks: the rank that holds each of the p v stages, in stage order.
        copies: how often the stages hold the whole model, one copy behind the other; each copy
            works on an equal run of the micro-batches.
    """

    name: str
    p: int
    m: int
    v: int
    rows: tuple[Row, ...]
    ranks: tuple[int, ...]
    copies: int = 1

    @property
    def num_stages(self) -> int:
        """Slices of layers, p v, counted in every copy of the model."""
        return len(self.ranks)

    @property
    def depth(self) -> int:
        """Stages that one micro-batch passes."""
        return self.num_stages // self.copies

    def microbatches_of(self, stage: int) -> range:
        """The micro-batches that pass `stage`: all of them, unless the model is there twice.

        Args:
            stage: 0 to `num_stages` - 1, counted through all copies of the model.
        """
        copy, share = stage // self.depth, self.m // self.copies
        return range(copy * share, (copy + 1) * share)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(s for s, owner in enumerate(self.ranks) if owner == rank)

    def texts(self) -> list[list[str]]:
        """The rows in text form, as `--json` and CSV files carry them."""
        return [[str(action) for action in row] for row in self.rows]
