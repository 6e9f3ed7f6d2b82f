"""All that one rank sends in a step, and whether a run is possible: every axis asked in turn."""

from phalanx.core.layout import Coordinates
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.cost import offload, precision
from phalanx.cost.axes import context, data, expert, pipeline, tensor

AXES = (data, tensor, context, pipeline, expert, precision)


def refuse_impossible(run: Run) -> None:
    """Ask every axis whether it can cut this run.

    Raises:
        RefusedError: the first axis that cannot, with the numbers and the nearest that works.
    """
    for axis in AXES:
        axis.refuse(run)
    offload.refuse(run)


def transfers(run: Run, at: Coordinates) -> list[Message]:
    """What the rank at `at` sends in one optimizer step, equal messages added up."""
    sent = [t for axis in AXES for t in axis.transfers(run, at)]
    if run.layout.ranks > 1:
        sent += [
            Message("world", "all_reduce", "gradient norm", 8),
            Message("world", "all_reduce", "loss", 8),
        ]
    totals: dict[Message, int] = {}
    for transfer in sent:
        key = transfer._replace(times=0)
        totals[key] = totals.get(key, 0) + transfer.times
    return sorted(key._replace(times=times) for key, times in totals.items() if times)
