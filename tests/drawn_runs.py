"""Runs that the trainer can take, drawn from whatever goes together."""

from dataclasses import replace
from random import Random

from phalanx.core.errors import PhalanxError
from phalanx.core.precision import SCALED, Precision
from phalanx.core.run import Run
from phalanx.oracle.cases import sample
from phalanx.trainer.run.limits import refuse_untrainable

# What an expert's capacity drops is not sent, and how much that is only the router knows.
ROUTED = {"recipe": {"capacity": 0.0}}


def drawn_runs(count: int, max_ranks: int = 16, seed: int = 0) -> list[Run]:
    """Draw runs; the same ones for the same arguments.

    Args:
        count: how many.
        max_ranks: of a layout.
        seed: of the draw.
    """
    random = Random(seed)
    return [
        _varied(spec.case().run, random) for spec in sample(count, max_ranks, seed, changes=ROUTED)
    ]


def _varied(run: Run, random: Random) -> Run:
    """What the oracle seldom draws, since it proves less there: 16 bits, few bits, PipeDream.

    fp16 is left out: a step that overflows is skipped, and sends less.
    """
    layout, rest = run.layout, random.choice(("fp64", "bf16", "fp32"))
    recipe = layout.precision.recipe or random.choice(("", *SCALED))
    changes = [
        replace(layout, precision=Precision(rest=rest)),
        replace(layout, precision=Precision(recipe, rest)),
        replace(layout, schedule="pipedream", v=1, optimistic=False),
    ]
    changes = changes[: 3 if random.random() < 0.1 else 2]
    for changed in changes:
        clip = 0.0 if changed.schedule == "pipedream" else run.recipe.clip
        other = replace(run, layout=changed, recipe=replace(run.recipe, clip=clip))
        try:
            refuse_untrainable(other)
        except PhalanxError:
            continue
        run = other
    return run
