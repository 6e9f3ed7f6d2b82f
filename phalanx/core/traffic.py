"""What one axis says it sends in a step, so that a plan and a run can be compared."""

from typing import Literal, NamedTuple

Axis = Literal["data", "tensor", "context", "pipeline", "expert", "world"]
Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
]


class Transfer(NamedTuple):
    """One kind of message, as a single rank issues it.

    Attributes:
        axis: the axis of the mesh that it crosses.
        collective: the operation.
        purpose: what it is for, in a few words; the same word in the plan and in the run.
        bytes: size of the full vector: what is reduced, the gathered result, the message sent.
        times: how often in one optimizer step.
    """

    axis: Axis
    collective: Collective
    purpose: str
    bytes: int
    times: int = 1
