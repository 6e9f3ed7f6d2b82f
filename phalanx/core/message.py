"""What ranks send each other: what a plan says before a step and a run records during it."""

from typing import Literal, NamedTuple

Axis = Literal["data", "tensor", "context", "pipeline", "expert", "world"]
Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
]


class Message(NamedTuple):
    """One kind of message, as a single rank issues it in one optimizer step.

    Example:
        >>> Message("data", "all_reduce", "gradients", bytes=4096).times
        1

    Attributes:
        axis: the axis of the mesh that it crosses.
        collective: the operation.
        purpose: what it is for, in a few words; the same words in the plan and in the run.
        bytes: size of the full vector: what is reduced, the gathered result, the message sent.
        times: how often in one optimizer step.
    """

    axis: Axis
    collective: Collective
    purpose: str
    bytes: int
    times: int = 1
