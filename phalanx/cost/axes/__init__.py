"""One file per axis: what it cannot do, with the nearest that works."""

from phalanx.core.run import Run
from phalanx.cost import offload, precision
from phalanx.cost.axes import context, data, expert, pipeline, tensor

AXES = (data, tensor, context, pipeline, expert, precision, offload)


def refuse_impossible(run: Run) -> None:
    """Ask every axis whether it can cut this run.

    Raises:
        RefusedError: the first axis that cannot, with the numbers and the nearest that works.
    """
    for axis in AXES:
        axis.refuse(run)
