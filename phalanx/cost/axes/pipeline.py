"""The pipeline axis: what stages send each other. Its twin is phalanx/trainer/engine/wire.py.

Splits: the layers. Sends s/t b h elements for each micro-batch over each boundary between
stages on different ranks, forward and back. Once a step it sums the gradient of embeddings that
are tied across it, and those of both copies of the model under DualPipe.
Sources: Narayanan et al. 2021 (arXiv:2104.04473), section 3.2; DeepSeek-V3 (arXiv:2412.19437),
section 3.2.1.
"""

from collections.abc import Iterator

from phalanx.core.errors import RefusedError, shorten
from phalanx.core.layout import FOLDED, Coordinates, Layout
from phalanx.core.message import Message
from phalanx.core.run import Run
from phalanx.cost.units import bytes_per_element, kept_elements, passes, tokens_at, units_at
from phalanx.schedules.file import read_schedule, refuse_early_embedding, schedule_to_train
from phalanx.schedules.placement import placement


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


def transfers(run: Run, at: Coordinates) -> Iterator[Message]:
    """What the rank at `at` sends along pp in one step."""
    layout, m = run.layout, passes(run)
    if layout.pp == 1:
        return
    compute, wide = bytes_per_element(layout)
    parts = layout.tp if layout.sequence_parallel else 1
    size = tokens_at(run) // parts * run.model.hidden * compute
    where = placement(layout)
    for stage in where.stages_of(at.pp):
        if where.crosses(stage, 1):
            yield Message("pipeline", "send", "activations", size, m)
        if where.crosses(stage, -1):
            yield Message("pipeline", "send", "activation gradients", size, m)
    for unit in units_at(run, at):
        size = kept_elements(unit, layout) * wide
        if where.copies > 1:
            yield Message("pipeline", "all_reduce", "gradients both ways", size)
        if unit.tied:
            yield Message("pipeline", "all_reduce", "tied embedding", size)
