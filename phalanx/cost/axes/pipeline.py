"""The pipeline axis: what it refuses. What it sends is in `cost/messages/pipeline.py`."""

from phalanx.core.errors import RefusedError, shorten
from phalanx.core.layout import DEFAULT_SCHEDULE, Layout
from phalanx.core.run import Run
from phalanx.schedules.check import check
from phalanx.schedules.file import refuse_early_embedding
from phalanx.schedules.layouts import chunks, layers_of_stages, spec_of
from phalanx.schedules.registry import NAMES
from phalanx.schedules.spec import ScheduleSpec


def refuse(run: Run) -> None:
    """Raise RefusedError where layers or micro-batches do not suit the schedule."""
    layout, m, spec = run.layout, run.micro_batches, spec_of(run.layout)
    _refuse_sizes(layout, spec, m)
    if layout.schedule not in NAMES:
        schedule = spec.build(layout.pp, m, chunks(layout))
        check(schedule)
        if run.model.tied:
            refuse_early_embedding(schedule)
    layers_of_stages(layout, run.model.layers)
    if layout.compile and spec.splits_backward:
        raise RefusedError(
            f"schedule={layout.schedule} splits the backward, which a compiled block does at "
            f"once; use compile=off, or schedule={DEFAULT_SCHEDULE}"
        )
    if spec.asynchronous:
        _refuse_synchrony(run)


def enough(layout: Layout, m: int) -> int:
    """The fewest micro-batches that the schedule takes, but at least `m`; a file has its own."""
    return spec_of(layout).micro_batches(layout.pp).fewest(m)


def _refuse_sizes(layout: Layout, spec: ScheduleSpec, m: int) -> None:
    """Raise where the schedule cannot be had with these ranks, chunks and micro-batches."""
    name, p, v = layout.schedule, layout.pp, chunks(layout)
    for key, size, sizes in (("pp", p, spec.ranks), ("v", v, spec.chunks)):
        if not sizes.hold(size):
            raise RefusedError(
                f"schedule={name} needs {key} to be {sizes}, not {key}={size}; use "
                f"{key}={sizes.nearest(size)}, or schedule={DEFAULT_SCHEDULE} with v=1"
            )
    sizes = spec.micro_batches(p)
    if sizes.hold(m):
        return
    fits = [sizes.fewest(1)]
    while len(fits) < 5 and not sizes.fixed:
        fits.append(sizes.fewest(fits[-1] + 1))
    unit = layout.dp * layout.mb
    raise RefusedError(
        f"schedule={name} on pp={p} needs the number of micro-batches to be {sizes}, and there are "
        f"{m}; recipe.batch can be {shorten([unit * fit for fit in fits], 4)}"
    )


def _refuse_synchrony(run: Run) -> None:
    """Under PipeDream stages never meet: whatever needs all of them at one time cannot be had."""
    layout, recipe, shape = run.layout, run.recipe, run.model
    for asked, needs, instead in (
        (
            recipe.clip > 0,
            f"recipe.clip={recipe.clip:g} needs the norm of all stages",
            "recipe.clip=0",
        ),
        (layout.optimistic, "optimistic=on needs a norm to wait for", "optimistic=off"),
        (layout.zero_stage >= 2, f"zero={layout.zero} lets go of what it stashes", "zero=1"),
        (shape.tied and layout.pp > 1, "a tied table moves on both ends", "model.tied=false"),
        (shape.is_moe, "experts are balanced once a step", "model.experts=0"),
        (
            layout.precision.recipe or layout.precision.rest == "fp16",
            f"precision={layout.precision} has scales that all stages agree on",
            "precision=bf16",
        ),
    ):
        if asked:
            raise RefusedError(
                f"schedule={layout.schedule} moves each stage by itself, but {needs}; "
                f"use {instead}, or schedule={DEFAULT_SCHEDULE}"
            )
