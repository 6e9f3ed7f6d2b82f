"""What a model refuses by itself, however it is cut."""

from phalanx.core.run import Run
from phalanx.cost.refusals.rule import Rule, Scope, keys


def _says_positions(run: Run) -> str:
    seq, most = run.recipe.seq, run.model.max_positions
    return (
        f"recipe.seq={seq} is longer than the {most} learned positions; use recipe.seq up to "
        f"{most}, or raise model.max_positions"
    )


RULES = (
    Rule(
        "sequences are longer than the learned positions",
        keys(""),
        lambda x: (
            (x.tp >= 1) & (x.model.positions == "learned") & (x.recipe.seq > x.model.max_positions)
        ),
        _says_positions,
        Scope.OURS,
    ),
)
