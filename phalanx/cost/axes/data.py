"""The data axis: what ZeRO 0 to 3 and HSDP send. Its twin is phalanx/trainer/parallel/data.py.

Splits: the batch, and the optimizer state, gradients and weights as the ZeRO stage says.
Sends, for a unit of n elements, m micro-batches, c bytes in products and w bytes in gradients:

    stage  gradients                        weights
    0      all-reduce n w, once             -
    1      reduce-scatter n w, once         all-gather n c, once
    2      reduce-scatter n w, m times      all-gather n c, once
    3      reduce-scatter n w, m times      all-gather n c, m times in forward and in backward

PipeDream does each of these m times, since every micro-batch is an update of its own.
With reshard=off stage 3 gathers once a step, and lets go after the last backward: Llama 3 keeps
weights from forward to backward (arXiv:2407.21783, section 3.3.2). Under HSDP each rank's part is
all-reduced once more, over the copies. Ranks along cp hold the same weights and see other tokens:
they belong to this axis too. Experts are alike only on ranks with the same place along ep, and so
n is shared by 1/e of the ranks. Source: Rajbhandari et al. 2019 (arXiv:1910.02054), section 7.
"""

from collections.abc import Iterator

from phalanx.core.layout import Coordinates
from phalanx.core.run import Run
from phalanx.core.traffic import Transfer
from phalanx.cost.units import UnitSize, bytes_per_element, passes, units_at
from phalanx.schedules.layouts import is_asynchronous, reduces_every


def refuse(run: Run) -> None:
    """Raise RefusedError where the batch does not divide over dp and micro-batches."""
    run.layout.micro_batches(run.recipe.batch)


def transfers(run: Run, at: Coordinates) -> Iterator[Transfer]:
    """What the rank at `at` sends along dp in one step."""
    layout = run.layout
    if layout.dp * layout.cp == 1:
        return
    counts = passes(run) if is_asynchronous(layout) else 1
    yield Transfer("data", "all_reduce", "valid tokens", 8 * counts)
    for unit in units_at(run, at):
        yield from _of_unit(run, unit)


def _of_unit(run: Run, unit: UnitSize) -> Iterator[Transfer]:
    layout, m = run.layout, passes(run)
    compute, wide = bytes_per_element(layout)
    ep = layout.ep if unit.spread else 1
    updates = m if is_asynchronous(layout) else 1
    everyone, sharers = layout.dp * layout.cp // ep, layout.sharers // ep
    if layout.zero_stage == 0:
        if everyone > 1:
            size = unit.padded(everyone) * wide
            yield Transfer("data", "all_reduce", "gradients", size, updates)
        return
    n = unit.padded(sharers)
    reductions = m if reduces_every(layout) else 1
    again = layout.zero_stage == 3 and layout.reshard
    gathers = m * (unit.uses + unit.backward) if again else updates
    if sharers > 1:
        yield Transfer("data", "reduce_scatter", "gradients", n * wide, reductions)
        yield Transfer("data", "all_gather", "weights", n * compute, gathers)
    if layout.replicas > 1:
        part = n // sharers * wide
        yield Transfer("data", "all_reduce", "gradients of copies", part, updates)
