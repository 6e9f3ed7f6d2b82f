"""The moments of a backward pass that compete for the peak, of many layouts at once.

The twin of `cost.memory._moments`, by column.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from phalanx.planner.columns import Booleans, Floats, Integers


class Whole(NamedTuple):
    """Bytes per parameter of units that are whole for a while.

    Attributes:
        weights: gathered.
        gradients: not yet reduced.
        travelling: on their way, with the part that arrives.
    """

    weights: float
    gradients: float
    travelling: Floats


@dataclass(frozen=True)
class RankBytes:
    """One kind of pipeline rank of every row, before ZeRO stages are known.

    Attributes:
        shared: parameters that all data-parallel ranks hold alike.
        experts: parameters that only ranks with the same place along ep hold alike.
        block: parameters of its largest block.
        table: of a token table, if it holds one.
        tied: the same if it is embedding and head at once.
        left: of the units whose gradients travel on from the micro-batch before.
        blocks: of its longest stage.
        alone: 1 if it has one stage.
        first: 1 if it has the first stage.
        last: 1 if it has the last stage.
        activations: bytes kept by the micro-batches in flight, and of messages on the way.
        stage: bytes that one micro-batch keeps in one of its stages.
        each: bytes that it keeps in one block.
        loss: bytes of the head while the loss is computed.
        put_by: of these, what stays when the logits have become a gradient.
        gradient: bytes of that.
        made: bytes of the gradient of the table, as its product leaves it.
        boundary: bytes of one activation between blocks.
        let_go: bytes of the head that a split backward does not keep for its second half.
        again: bytes that recomputation brings back while one block is differentiated.
        coming: bytes of gradients of its activations.
        plain: bytes beside state and activations at the worst moment, if no unit is whole.
    """

    shared: Floats
    experts: Floats
    block: Floats
    table: Floats
    tied: Floats
    left: Floats
    blocks: Floats
    alone: Floats
    first: Floats
    last: Floats
    activations: Floats
    stage: Floats
    each: Floats
    loss: Floats
    put_by: Floats
    gradient: Floats
    made: Floats
    boundary: Floats
    let_go: Floats
    again: Floats
    coming: Floats
    plain: Floats

    def take(self, which: Integers | Booleans) -> "RankBytes":
        """Some of the rows."""
        return RankBytes(*(getattr(self, field.name)[which] for field in fields(self)))


def with_plain(rank: RankBytes) -> RankBytes:
    """The same, its worst moment without whole units found once for all."""
    return replace(rank, plain=_worst_moment(rank, Whole(0.0, 0.0, np.zeros(1))))


def worst_moment(rank: RankBytes, whole: Whole) -> Floats:
    """Bytes beside the state and the activations at the worst moment."""
    return _worst_moment(rank, whole) if whole.gradients else rank.plain


def _worst_moment(rank: RankBytes, whole: Whole) -> Floats:
    """What `worst_moment` finds.

    A split backward lets go of some of the head; see `planner/bytes.py`.
    """
    backward = _behind_it(rank, whole)
    if not rank.last.any():
        return backward
    head = _at_the_head(rank, whole)
    return np.where(head > backward, head - rank.let_go, backward)


def _at_the_head(rank: RankBytes, whole: Whole) -> Floats:
    made = rank.put_by + rank.boundary + rank.made
    if not whole.gradients:
        return rank.last * np.maximum(rank.loss, made + rank.gradient)
    fixed = whole.weights * (rank.table + rank.block) + whole.travelling * rank.left
    summed = np.maximum(rank.gradient, whole.gradients * rank.table)
    return rank.last * (fixed + np.maximum(rank.loss, made + summed))


def _behind_it(rank: RankBytes, whole: Whole) -> Floats:
    """The first block, the second one, and the table."""
    blocks = rank.again + rank.coming
    if whole.gradients:
        blocks = blocks + _units_behind(rank, whole)
    if not rank.first.any():
        return blocks
    end = rank.made + rank.boundary - rank.stage
    if whole.gradients:
        before = rank.block + np.maximum(rank.left - rank.table, 0)
        end = end + whole.gradients * rank.table + whole.travelling * before
        end = end + whole.weights * rank.tied
    return np.maximum(blocks, rank.first * end)


def _units_behind(rank: RankBytes, whole: Whole) -> Floats:
    """Bytes of whole units beside the first block, or more of them less what the second frees."""
    units = whole.weights * (np.minimum(rank.blocks, 2) * rank.block + rank.tied)
    still = rank.left * (1 - rank.last * rank.alone)
    others = np.maximum(rank.left - rank.block, 0) * (1 - rank.alone)
    second = (rank.blocks > 1) * (whole.travelling * (rank.block + others) - rank.each)
    travelling = np.maximum(whole.travelling * still, second)
    return units + whole.gradients * (rank.block + rank.tied) + travelling
