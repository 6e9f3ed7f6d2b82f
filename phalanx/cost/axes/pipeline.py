"""The pipeline axis: what it refuses. What it sends is in `cost/messages/pipeline.py`."""

from phalanx.core.errors import RefusedError, shorten
from phalanx.core.layout import FOLDED, Layout
from phalanx.core.run import Run
from phalanx.schedules.file import read_schedule, refuse_early_embedding, schedule_to_train


def refuse(run: Run) -> None:
    """Raise RefusedError where layers or micro-batches do not suit the schedule."""
    layout, m = run.layout, run.micro_batches
    if layout.schedule.endswith(".csv"):
        schedule = schedule_to_train(layout, m)
        if run.model.tied:
            refuse_early_embedding(schedule)
    layout.layers_of_stages(run.model.layers)
    _refuse_chunks(layout)
    _refuse_compiled(layout)
    if layout.asynchronous:
        _refuse_synchrony(run)
    if layout.schedule == "dualpipe" and layout.pp % 2:
        raise RefusedError(
            f"schedule=dualpipe pairs its ranks, but pp={layout.pp} is odd; "
            f"use pp={layout.pp + 1}, or schedule=dualpipev"
        )
    if enough(layout, m) != m:
        fits = [enough(layout, 1)]
        while len(fits) < 5:
            fits.append(enough(layout, fits[-1] + 1))
        unit = layout.dp * layout.mb
        raise RefusedError(
            f"schedule={layout.schedule} on pp={layout.pp} needs {_WANTED[layout.schedule]} "
            f"micro-batches, and there are {m}; recipe.batch can be "
            f"{shorten([unit * fit for fit in fits], 4)}"
        )


_WANTED = {
    "interleaved": "a multiple of pp",
    "dualpipe": "an even number, at least 2 pp, of",
    "dualpipev": "at least 2 pp",
}


def enough(layout: Layout, m: int) -> int:
    """The fewest micro-batches that the schedule takes, but at least `m`; a file has its own."""
    p = layout.pp
    match layout.schedule:
        case "interleaved":
            return -(-m // p) * p
        case "dualpipe":
            return max(2 * p, m + m % 2)
        case "dualpipev":
            return max(2 * p, m)
        case name if name.endswith(".csv"):
            return read_schedule(name).m
        case _:
            return m


def _refuse_chunks(layout: Layout) -> None:
    """Only interleaving and files leave the number of chunks open."""
    if layout.schedule.endswith(".csv"):
        return
    if layout.schedule == "interleaved":
        if min(layout.pp, layout.chunks) == 1:
            raise RefusedError(
                f"pp={layout.pp} v={layout.chunks} has nothing to interleave; use pp and v of at "
                "least 2, or schedule=1f1b with v=1"
            )
        return
    needed = 2 if layout.schedule in FOLDED else 1
    if layout.chunks != needed:
        raise RefusedError(
            f"schedule={layout.schedule} has {needed} stage{'s' * (needed > 1)} per rank, not "
            f"v={layout.chunks}; use schedule=interleaved, or v={needed}"
        )


def _refuse_compiled(layout: Layout) -> None:
    """A compiled block computes both halves of its backward at once."""
    if layout.compile and layout.schedule not in ("gpipe", "1f1b", "interleaved", "pipedream"):
        raise RefusedError(
            f"schedule={layout.schedule} splits the backward, which a compiled block does at "
            "once; use compile=off, or schedule=1f1b"
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
                f"schedule=pipedream moves each stage by itself, but {needs}; "
                f"use {instead}, or schedule=1f1b"
            )
