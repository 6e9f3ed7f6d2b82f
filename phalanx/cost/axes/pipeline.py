"""The pipeline axis: what stages send each other. Its twin is phalanx/train/wire.py.

Splits: the layers. Sends s/t b h elements for each micro-batch over each boundary between
stages, forward and back, and once a step the gradient of embeddings that are tied across it.
Source: Narayanan et al. 2021 (arXiv:2104.04473), section 3.2.
"""

from collections.abc import Iterator

from phalanx.core.errors import RefusedError, shorten
from phalanx.core.layout import Coordinates
from phalanx.core.run import Run
from phalanx.core.traffic import Transfer
from phalanx.cost.units import bytes_per_element, padded_seq, stages_at, units_at


def refuse(run: Run) -> None:
    """Raise RefusedError where layers or micro-batches do not suit the schedule."""
    layout, m = run.layout, run.micro_batches
    layout.layers_of_stages(run.model.layers)
    if layout.v > 1 and layout.schedule != "interleaved":
        raise RefusedError(
            f"schedule={layout.schedule} has one stage per rank, not v={layout.v}; "
            "use schedule=interleaved, or v=1"
        )
    if layout.schedule == "interleaved" and min(layout.pp, layout.v) == 1:
        raise RefusedError(
            f"pp={layout.pp} v={layout.v} has nothing to interleave; use pp and v of at least 2, "
            "or schedule=1f1b with v=1"
        )
    if layout.schedule == "interleaved" and m % layout.pp:
        unit = layout.dp * layout.mb
        batches = [unit * layout.pp * i for i in range(1, 5)]
        raise RefusedError(
            f"schedule=interleaved needs micro-batches in groups of pp={layout.pp}, and there are "
            f"{m}; recipe.batch can be {shorten([*batches, batches[-1] + batches[0]], 4)}"
        )


def transfers(run: Run, at: Coordinates) -> Iterator[Transfer]:
    """What the rank at `at` sends along pp in one step."""
    layout, m = run.layout, run.micro_batches
    if layout.pp == 1:
        return
    compute, wide = bytes_per_element(layout)
    parts = layout.tp if layout.sp else 1
    size = padded_seq(run) // parts * layout.mb * run.model.hidden * compute
    for stage, _ in stages_at(run, at):
        if stage < layout.num_stages - 1:
            yield Transfer("pipeline", "send", "activations", size, m)
        if stage > 0:
            yield Transfer("pipeline", "send", "activation gradients", size, m)
    for unit in units_at(run, at):
        if unit.tied:
            kept = unit.padded(layout.shard) // layout.shard
            n = kept if layout.zero_stage else unit.padded(layout.dp)
            yield Transfer("pipeline", "all_reduce", "tied embedding", n * wide)
