"""The tensor axis: what tp and sequence parallelism send. Its twin is train/parallel/tensor.py.

Splits: heads, the MLP's width, the vocabulary; under sp also the sequence between them.
Sends, for S = s b h c bytes of activations (s padded to a multiple of t under sp):

    around      forward (sp)        forward       backward (sp)                      backward
    columns     all-gather S        -             all-gather S, reduce-scatter S     all-reduce S
    rows        reduce-scatter S    all-reduce S  all-gather S                       -

A block has two of each, the embedding one of rows, the head one of columns and the two
reductions of the cross-entropy. Sources: Shoeybi et al. 2019 (arXiv:1909.08053), section 3;
Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from collections import Counter
from collections.abc import Iterator

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.layout import Coordinates
from phalanx.core.run import Run
from phalanx.core.traffic import Transfer
from phalanx.cost.units import bytes_per_element, padded_seq, stages_at, units_at


def refuse(run: Run) -> None:
    """Raise RefusedError where heads or vocabulary do not divide over tp."""
    shape, tp = run.model, run.layout.tp
    for count, what in ((shape.heads, "heads"), (shape.kv_heads, "kv heads")):
        if count % tp:
            fits = [t for t in divisors(shape.heads) if shape.kv_heads % t == 0]
            raise RefusedError(
                f"{count} {what} cannot be split over tp={tp}; tp can be {shorten(fits)}"
            )
    for size, what in ((shape.vocab, "a vocabulary"), (shape.ffn, "an MLP width")):
        if size < tp:
            raise RefusedError(f"{what} of {size} is smaller than tp={tp}; use a smaller tp")


def transfers(run: Run, at: Coordinates) -> Iterator[Transfer]:
    """What the rank at `at` sends along tp in one step."""
    layout, shape, m = run.layout, run.model, run.micro_batches
    if layout.tp == 1:
        return
    compute, wide = bytes_per_element(layout)
    tokens = padded_seq(run) * layout.mb
    counts: Counter[tuple[str, str]] = Counter()
    for _, layers in stages_at(run, at):
        last = layers.stop == shape.layers
        counts.update(_forward(run, rows=2 * len(layers) + (layers.start == 0), blocks=len(layers)))
        counts.update(_columns(run, 2 * len(layers) + last))
        if last:
            loss = max(wide, 4)
            yield Transfer("tensor", "all_reduce", "loss maximum", tokens * loss, m)
            yield Transfer("tensor", "all_reduce", "loss sums", 3 * tokens * loss, m)
    for (collective, purpose), times in counts.items():
        size = tokens * shape.hidden * compute
        yield Transfer("tensor", collective, purpose, size, times * m)  # type: ignore[arg-type]  # keys are Collectives
    reductions = m if layout.zero_stage >= 2 else 1
    for unit in units_at(run, at):
        if unit.partial:
            size = unit.partial * wide
            yield Transfer("tensor", "all_reduce", "partial gradients", size, reductions)


def _columns(run: Run, count: int) -> dict[tuple[str, str], int]:
    """Messages around `count` products by columns, recompute of blocks left out."""
    if not run.layout.sp:
        return {("all_reduce", "tp input gradient"): count}
    return {
        ("all_gather", "tp input"): count,
        ("all_gather", "tp input again"): count,
        ("reduce_scatter", "tp input gradient"): count,
    }


def _forward(run: Run, *, rows: int, blocks: int) -> dict[tuple[str, str], int]:
    """Messages around `rows` products by rows, and what recomputing `blocks` blocks repeats.

    Recomputation stops at the last tensor that backward needs: the sum that ends a block is
    repeated only if dropout follows it.
    """
    again = blocks if run.layout.recompute == "full" else 0
    repeated = again * (2 if run.recipe.dropout else 1)
    if not run.layout.sp:
        return {("all_reduce", "tp output"): rows + repeated}
    return {
        ("reduce_scatter", "tp output"): rows + repeated,
        ("all_gather", "tp output gradient"): rows,
        ("all_gather", "tp input"): 2 * again,
    }
