"""What the planner can price and the trainer cannot run yet: refused by name, before it starts."""

from phalanx.core.errors import RefusedError
from phalanx.core.run import Run
from phalanx.cost.axes import refuse_impossible

PARTS = ("core", "norms", "mlp", "activation", "operators")


def refuse_untrainable(run: Run) -> None:
    """Raise where this run cannot be cut so, or needs what the trainer does not have.

    Raises:
        RefusedError: naming what to change.
    """
    layout, shape = run.layout, run.model
    if not layout.recompute.parts <= set(PARTS):
        raise RefusedError(
            f"recompute={layout.recompute}: the trainer recomputes whole blocks, or of their parts "
            f"{', '.join(PARTS)}; the planner can price the rest"
        )
    if layout.precision.recipe and not layout.recompute.parts <= {"core"}:
        raise RefusedError(
            f"recompute={layout.recompute} with precision={layout.precision}: its products keep "
            "their inputs in few bits; use recompute=none, selective, full or full:k"
        )
    if layout.compile and not layout.recompute.parts <= {"core"}:
        raise RefusedError(
            f"recompute={layout.recompute} with compile=on: what a fused block keeps is up to the "
            "compiler; use recompute=none, selective, full or full:k, or compile=off"
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
