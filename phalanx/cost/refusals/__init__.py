"""What cannot be, feature by feature: asked of one run, or of every row of a table.

Every entry to the program asks here, so all give the same answer: the oracle, the trainer, an
estimate and a search, for our trainer or for another program.
"""

from collections.abc import Iterator

from phalanx.core.refusal import Refusal
from phalanx.core.run import Run
from phalanx.cost.refusals import (
    context,
    data,
    expert,
    memory,
    model,
    pipeline,
    precision,
    tensor,
)
from phalanx.cost.refusals.rule import Rule
from phalanx.cost.table import Booleans, Table

FEATURES = (model, memory, data, tensor, context, pipeline, expert, precision)


def rules(*, ours: bool = True) -> tuple[Rule, ...]:
    """All that bind our trainer, or another program, in the order in which they are asked."""
    return tuple(
        rule for feature in FEATURES for rule in feature.RULES if rule.scope.binds(ours=ours)
    )


def refusal(run: Run, *, ours: bool = True) -> Refusal | None:
    """Why a run cannot be cut so; None if it can.

    Args:
        run: model, layout and recipe.
        ours: whether our trainer is to run it, or another program.

    Raises:
        UsageError: there is no such schedule.

    Example:
        >>> from phalanx.catalog.load import model
        >>> from phalanx.core.layout import Layout
        >>> print(refusal(Run(model=model("gpt-3-175b"), layout=Layout(tp=5))).message)
        96 heads cannot be split over tp=5; tp can be 1, 2, 3, 4, 6, 8, 12, 16, ...
    """
    row = Table.of_run(run)
    for rule in rules(ours=ours):
        if rule.clashes(row).any():
            return Refusal(rule.reason, rule.says(run))
    return None


def refuse(run: Run, *, ours: bool = True) -> None:
    """Raise where a run cannot be cut so.

    Args:
        run: model, layout and recipe.
        ours: whether our trainer is to run it, or another program.

    Raises:
        RefusedError: the numbers that clash, and the nearest that works.
    """
    found = refusal(run, ours=ours)
    if found:
        raise found.error()


def refused(
    table: Table, known: frozenset[str], new: frozenset[str], *, ours: bool = True
) -> Iterator[tuple[str, Booleans]]:
    """Which rows cannot be, reason by reason, by the rules that `new` keys have made decidable.

    Args:
        table: layouts of which the keys `known` and `new` are settled.
        known: keys that were settled when the table was asked before.
        new: keys that are settled since.
        ours: whether our trainer is to run them, or another program.
    """
    for rule in rules(ours=ours):
        if rule.keys <= known | new and not (known and rule.keys <= known):
            yield rule.reason, rule.clashes(table)
