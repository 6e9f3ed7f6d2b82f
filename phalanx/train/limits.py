"""What the planner can price and the trainer cannot run yet: refused by name, before it starts."""

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run
from phalanx.cost.traffic import refuse_impossible

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev")
RECOMPUTE = ("none", "selective", "full")


def refuse_untrainable(run: Run) -> None:
    """Raise where this run cannot be cut so, or needs what the trainer does not have.

    Raises:
        RefusedError: naming what to change.
    """
    layout, shape = run.layout, run.model
    limits = (("schedule", SCHEDULES), ("recompute", RECOMPUTE))
    for key, runs in limits:
        asked = getattr(layout, key)
        if asked not in runs and not asked.endswith(".csv"):
            raise RefusedError(
                f"{key}={asked}: the trainer runs {', '.join(runs)}; the planner can price the rest"
            )
    if 0 in layout.stages:
        raise RefusedError(
            f"stages={'+'.join(map(str, layout.stages))}: the trainer needs a block in every "
            "stage; give the first and the last at least 1"
        )
    if shape.positions == "learned" and run.recipe.seq > shape.max_positions:
        raise RefusedError(
            f"recipe.seq={run.recipe.seq} is longer than the {shape.max_positions} learned "
            f"positions; use recipe.seq up to {shape.max_positions}, or raise model.max_positions"
        )
    refuse_impossible(run)
