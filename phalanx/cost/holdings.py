"""How many units of each kind the ranks of a pipeline hold, as its stages are placed.

Of blocks that are computed again together, some send less than others; they are counted apart.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operator import UnitName
from phalanx.cost.table import Booleans, Integers, Table
from phalanx.schedules.layouts import layers_of_stages, placement
from phalanx.schedules.placement import Placement

# What messages are counted by: units of the model; the neighbours of a rank's stages, if on other
# ranks; the rank itself, once.
Place = UnitName | Literal["stage before", "stage behind", "rank"]
# Of the blocks that are computed again in one segment: all; all but the last; all but the last two.
Share = Literal["all", "not last", "not last two"]

_PLACES: tuple[Place, ...] = (
    "embedding",
    "dense block",
    "routed block",
    "head",
    "stage before",
    "stage behind",
    "rank",
)
_SHARES: tuple[Share, ...] = ("all", "not last", "not last two")
_KEYS = tuple((place, share) for place in _PLACES for share in _SHARES)

Counts = Counter[tuple[Place, Share]]


@dataclass(frozen=True)
class Holdings:
    """What one pipeline rank of every row holds.

    Attributes:
        counts: units by kind and share, all stages of the rank together.
        copies: of the model in the pipeline, which divide the micro-batches between them.
        ends_together: whether the ranks that embed are those that compute the loss.
    """

    counts: dict[tuple[Place, Share], Integers]
    copies: Integers
    ends_together: Booleans

    def count(self, place: Place, share: Share = "all") -> Integers:
        """How many units of a kind a rank holds in every row, all its stages together.

        Args:
            place: the kind of unit; or a neighbour of a stage on another rank, or the rank itself.
            share: of the blocks of a segment that is computed again, which ones count.
        """
        return self.counts[place, share]


def holdings(table: Table, pp_rank: int = 0) -> Holdings:
    """What pipeline rank `pp_rank` holds; nothing in rows with fewer pipeline ranks.

    Args:
        table: the layouts.
        pp_rank: from 0.

    Raises:
        RefusedError: a row whose layers cannot fill its stages.
    """
    segments = table.recompute.pick(lambda recompute: recompute.segment).astype(np.int64)
    keys = (table.pp, table.v, table.schedule.codes, table.stages.codes, segments)
    columns = np.broadcast_arrays(*keys)
    bounds = [int(column.max()) + 1 for column in columns]
    rows = np.ravel_multi_index(columns, bounds)
    distinct, which = np.unique(rows, return_inverse=True)
    found = []
    for pp, v, schedule, stages, segment in zip(*np.unravel_index(distinct, bounds), strict=True):
        layout = Layout(
            pp=int(pp),
            v=int(v),
            schedule=table.schedule.values[schedule],
            stages=table.stages.values[stages],
        )
        where = placement(layout)
        sizes = layers_of_stages(layout, table.model.layers)
        counts = _counts(table.model, sizes, where, pp_rank, int(segment))
        found.append([counts[key] for key in _KEYS] + [where.copies, where.ends_together])
    values = np.array(found, dtype=np.int64).T[:, which.reshape(rows.shape)]
    return Holdings(
        counts=dict(zip(_KEYS, values[:-2], strict=True)),
        copies=values[-2],
        ends_together=values[-1].astype(np.bool_),
    )


@lru_cache(maxsize=4096)
def _counts(
    shape: ModelShape, sizes: tuple[int, ...], where: Placement, pp_rank: int, segment: int
) -> Counts:
    """Units of one pipeline rank, whose stages hold `sizes` blocks each."""
    counts, stages = Counts(), where.stages_of(pp_rank)
    for stage in stages:
        layers = layers_of_slice(sizes, stage % where.depth)
        ends = segment_ends(segment, layers)
        for layer in layers:
            kind: Place = "routed block" if shape.routes(layer) else "dense block"
            counts[kind, "all"] += 1
            counts[kind, "not last"] += layer not in ends
            counts[kind, "not last two"] += layer not in ends and layer + 1 not in ends
        counts["embedding", "all"] += stage % where.depth == 0
        counts["head", "all"] += (stage + 1) % where.depth == 0
        counts["stage before", "all"] += where.crosses(stage, -1)
        counts["stage behind", "all"] += where.crosses(stage, 1)
    counts["rank", "all"] += bool(stages)
    return counts


def layers_of_slice(sizes: tuple[int, ...], place: int) -> range:
    """The blocks of one slice of the model, counted from 0 over all of it.

    Args:
        sizes: blocks of every slice, first to last.
        place: of the slice among them, from 0.

    Example:
        >>> layers_of_slice((7, 9, 8), 1)
        range(7, 16)
    """
    first = sum(sizes[:place])
    return range(first, first + sizes[place])


def segment_ends(segment: int, layers: range) -> frozenset[int]:
    """The last block of each segment of a stage that is computed again together.

    Backward computes a segment from its input to its last saved tensor, and differentiates it: so
    it gathers the weights of all but the last two blocks twice. Where nothing is computed again,
    every block is a segment.

    Args:
        segment: blocks of one, counted from the first of the stage, whose last one may be shorter;
            0 where no whole block is computed again.
        layers: the blocks of the stage.

    Example:
        >>> sorted(segment_ends(3, range(8, 16)))
        [10, 13, 15]
    """
    if not segment:
        return frozenset(layers)
    return frozenset(min(i + segment, layers.stop) - 1 for i in layers[::segment])
