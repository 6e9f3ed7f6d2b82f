"""What cannot be trained: what no layout could cut so."""

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run
from phalanx.cost.refusals import refuse
from phalanx.schedules.layouts import is_asynchronous


def refuse_untrainable(run: Run) -> None:
    """Raise where a run cannot be cut so.

    Raises:
        RefusedError: the numbers that clash, and the nearest that works.
    """
    refuse(run)
    if run.recipe.spike == "skip" and is_asynchronous(run.layout):
        raise RefusedError(
            f"recipe.spike=skip with schedule={run.layout.schedule}: its weights have moved before "
            "the loss is known; use recipe.spike=tell, rollback or off"
        )
