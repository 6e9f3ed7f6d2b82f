"""Named points of the product, at which a test or a drill can injure it.

    from phalanx.trainer import faults
    faults.point("step.before", step=step)

No plan is loaded in an ordinary run, and then a point costs less than 100 ns and does nothing.
"""

from phalanx.trainer.faults.inject import load, point, unload
from phalanx.trainer.faults.plan import Fault, FaultPlan
from phalanx.trainer.faults.points import POINTS

__all__ = ["POINTS", "Fault", "FaultPlan", "load", "point", "unload"]
