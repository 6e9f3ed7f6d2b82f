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
    Rule(
        "tp cuts heads that are normalised together",
        keys("tp"),
        lambda x: (x.tp > 1) & x.model.norm_all_heads,
        lambda run: (
            f"queries and keys of {run.model.heads} heads are normalised together "
            f"(model.norm_all_heads), which tp={run.layout.tp} would cut; use tp=1"
        ),
        Scope.OURS,
    ),
    Rule(
        "logits in chunks are not capped",
        keys("logits"),
        lambda x: (x.logits > 0) & (x.model.logit_cap > 0),
        lambda run: (
            f"logits={run.layout.logits} makes logits in chunks, which are not capped by "
            f"model.logit_cap={run.model.logit_cap:g}; use logits=0"
        ),
        Scope.OURS,
    ),
)
