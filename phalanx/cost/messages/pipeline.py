"""The pipeline axis: what stages send each other. Its twin is phalanx/trainer/engine/wire.py.

Splits: the layers. Sends s/t b h elements for each micro-batch over each boundary between
stages on different ranks, forward and back. Once a step it sums the gradient of embeddings that
are tied across it, and those of both copies of the model under DualPipe.
Sources: Narayanan et al. 2021 (arXiv:2104.04473), section 3.2; DeepSeek-V3 (arXiv:2412.19437),
section 3.2.1.
"""

from collections.abc import Iterator

import numpy as np

from phalanx.cost.holdings import Place
from phalanx.cost.messages.unit import Among, Pass, Setting, UnitMessage, padded
from phalanx.cost.params import UnitSize, is_apart
from phalanx.cost.table import Booleans, Integers


def messages(setting: Setting) -> Iterator[UnitMessage]:
    """What stages send to their neighbours, and units to where the same parameters are."""
    table = setting.table
    if not (table.pp > 1).any():
        return
    parts = np.where(table.sp, table.tp, 1)
    size = setting.tokens // parts * table.model.hidden * setting.element
    directions: tuple[tuple[str, Pass, Place], ...] = (
        ("activations", "forward", "stage behind"),
        ("activation gradients", "input gradient", "stage before"),
    )
    for purpose, when, place in directions:
        yield UnitMessage(
            axis="pipeline",
            among="pp neighbours",
            collective="send",
            purpose=purpose,
            bytes=size,
            times=np.where(table.pp > 1, 1, 0),
            when=when,
            unit=place,
        )
    for each in setting.sizes:
        yield from _sums(setting, each)


def _sums(setting: Setting, size: UnitSize) -> Iterator[UnitMessage]:
    """Gradients of parameters that two pipeline ranks hold."""
    apart, exists = ~setting.held.ends_together, is_apart(setting.held, size)
    kinds: tuple[tuple[str, Among, Booleans], ...] = (
        ("gradients both ways", "pp replicas", exists & (setting.held.copies > 1)),
        ("tied embedding", "embedding group", apart & _is_tied_table(setting, size)),
    )
    for purpose, among, rows in kinds:
        yield UnitMessage(
            axis="pipeline",
            among=among,
            collective="all_reduce",
            purpose=purpose,
            bytes=_reduced_elements(setting, size) * setting.wide,
            times=np.where(rows & (setting.table.pp > 1), 1, 0),
            when="step",
            unit=size.unit,
        )


def _is_tied_table(setting: Setting, size: UnitSize) -> bool:
    return size.name == "embedding" and setting.table.model.tied


def _reduced_elements(setting: Setting, size: UnitSize) -> Integers:
    """Elements of a unit whose reduced gradient one rank keeps, with padding."""
    table = setting.table
    ep = table.ep if size.experts else np.ones_like(table.ep)
    everyone, sharers = table.dp * table.cp // ep, table.sharers // ep
    cut = padded(size.params, sharers) // np.maximum(sharers, 1)
    return np.where(table.zero_stage > 0, cut, padded(size.params, everyone))
