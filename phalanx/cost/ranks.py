"""What the ranks of a pipeline hold: blocks of each kind, and parameters of each unit.

Symbols: p pipeline ranks, v chunks per rank.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operators import describe
from phalanx.cost.params import unit_sizes
from phalanx.cost.table import Column, Integers, Table, some_rows
from phalanx.schedules.layouts import layers_of_stages, placement, spec_of


@dataclass(frozen=True)
class PipelineRanks:
    """Blocks and ends of pipeline ranks, in columns; of one layout, by rank.

    Attributes:
        dense, routed: blocks without and with experts, all stages of a rank together.
        longest: blocks of its longest stage.
        stages: how many stages it holds.
        first, last: 1 where it embeds, and where it computes the loss.
        together: 1 where the ranks that embed are those that compute the loss.
        splits: 1 where backward is split, and the loss is all that the last stage ends with.
        sizes: blocks of each of its stages, of shape (..., stages).
    """

    dense: Integers
    routed: Integers
    longest: Integers
    stages: Integers
    first: Integers
    last: Integers
    together: Integers
    splits: Integers
    sizes: Integers

    def take(self, which: Any) -> "PipelineRanks":
        """Some of them."""
        return PipelineRanks(*(getattr(self, field.name)[which] for field in fields(self)))

    @property
    def tall(self) -> "PipelineRanks":
        """Columns of shape (rows, 1) and, of sizes, (rows, 1, stages)."""
        return self.take((slice(None), None))

    def segments(self, length: int) -> Column:
        """How many segments its stages are cut into, the last of each perhaps a shorter one.

        Args:
            length: blocks of a segment, at least 1.
        """
        return (-(-self.sizes // length)).sum(axis=-1)


@lru_cache(maxsize=1024)
def ranks_of(shape: ModelShape, layout: Layout) -> PipelineRanks:
    """The ranks of one layout, in order.

    Args:
        shape: the model; its layers are dealt over the stages, those without experts first.
        layout: of it pp, v, schedule and stages.

    Raises:
        UsageError: there is no such schedule.
        RefusedError: the layers cannot fill the stages.

    Example:
        >>> from phalanx.catalog.load import model
        >>> ranks = ranks_of(model("gpt-3-175b"), Layout(pp=4, schedule="zb-v"))
        >>> ranks.dense.tolist(), ranks.first.tolist(), ranks.last.tolist()
        ([24, 24, 24, 24], [1, 0, 0, 0], [1, 0, 0, 0])
    """
    where = placement(layout)
    sizes = np.array(layers_of_stages(layout, shape.layers), dtype=np.int64)
    dense_layers = shape.dense_layers if shape.is_moe else shape.layers
    dense = np.clip(dense_layers - (np.cumsum(sizes) - sizes), 0, sizes)
    slices = np.array([where.slices_of(rank) for rank in range(layout.pp)])
    held = sizes[slices]
    one = np.ones(layout.pp, dtype=np.int64)
    return PipelineRanks(
        dense=dense[slices].sum(axis=1),
        routed=(sizes - dense)[slices].sum(axis=1),
        longest=held.max(axis=1),
        stages=one * slices.shape[1],
        first=(slices == 0).any(axis=1) * one,
        last=(slices == where.depth - 1).any(axis=1) * one,
        together=one * where.ends_together,
        splits=one * (spec_of(layout).splits_backward and slices.shape[1] == 1),
        sizes=held,
    )


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of each unit on one rank of every row, before ZeRO cuts them.

    Attributes:
        dense: of a block without experts.
        routed: of a block with experts, what all ranks share of it.
        experts: and its experts.
        table: of a token table, on the rank with most rows of it.
        embedding: with learned positions.
        head: with the final norm; where it is tied and embedding and head live together, that only.
    """

    dense: Column
    routed: Column
    experts: Column
    table: Column
    embedding: Column
    head: Column

    @classmethod
    def of(cls, table: Table, together: Column) -> "ParameterCounts":
        """Those of a table.

        Args:
            table: the layouts.
            together: see `PipelineRanks`.
        """
        shape, none = table.model, np.zeros_like(table.tp)
        counts: dict[tuple[str, str], Column] = {}
        for name, unit, params, *_ in unit_sizes(table, describe(shape)):
            if (unit, name) != ("head", "embedding"):
                counts[unit, name] = params
            else:  # a tied head is the table itself where one rank has both
                counts[unit, name] = np.where(together > 0, 0, params)

        def of(unit: str, *names: str) -> Column:
            some = (
                n for (u, name), n in counts.items() if u == unit and name in (names or (name,))
            )
            return sum(some, none)

        return cls(
            dense=of("dense block"),
            routed=of("routed block", "block"),
            experts=of("routed block", "experts"),
            table=of("embedding", "embedding"),
            embedding=of("embedding"),
            head=of("head"),
        )

    def take(self, which: Any) -> "ParameterCounts":
        """Some of the rows."""
        columns = (getattr(self, field.name) for field in fields(self))
        return ParameterCounts(*(some_rows(column, which) for column in columns))


def largest(blocks: PipelineRanks, dense: Column, routed: Column) -> Column:
    """The larger of two kinds of block, of those that a rank has; 0 where it has none.

    Args:
        blocks: what the ranks hold.
        dense: of a block without experts, in any unit; a column.
        routed: of a block with experts, in the same unit; a column.
    """
    return np.maximum((blocks.dense > 0) * dense, (blocks.routed > 0) * routed)
