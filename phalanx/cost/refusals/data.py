"""What the data axis refuses: a batch that dp and micro-batches do not divide."""

from phalanx.cost.refusals.rule import Rule, keys, said

RULES = (
    Rule(
        "dp x mb does not divide the batch",
        keys("dp mb"),
        lambda x: x.recipe.batch % (x.dp * x.mb) != 0,
        lambda run: said(lambda: run.micro_batches),
    ),
)
