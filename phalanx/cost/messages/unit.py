"""One kind of message of one kind of unit, for every row of a table, and what may hide it.

Axes yield these in the pass in which our trainer sends them. How many a rank sends follows from
how many of the units it holds.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from phalanx.core.layout import Coordinates
from phalanx.core.message import Axis, Collective
from phalanx.core.operator import ModelOperators
from phalanx.cost.holdings import Holdings, Place, Share
from phalanx.cost.params import UnitSize, unit_sizes
from phalanx.cost.table import Booleans, Floats, Integers, Table

# In which part of a micro-batch, or once in a step.
Pass = Literal["forward", "input gradient", "weight gradient", "recompute", "step"]
# Among whom: along an axis, or only those of its ranks that hold the same.
Among = Literal[
    "tp",
    "kv replicas",  # tp ranks that hold the same key and value heads
    "cp",
    "pp neighbours",
    "embedding group",  # the first and the last stage
    "pp replicas",  # the two ranks that hold the same stages (DualPipe)
    "dp",
    "shards",  # dp and cp ranks that share one sharded copy
    "replicas",  # dp ranks that hold the same shard of different copies (HSDP)
    "ep",
    "expert dp",  # the same three among the ranks that hold the same experts
    "expert shards",
    "expert replicas",
    "world",
]
# What goes on meanwhile: the product beside which it stands; attention to what is here already; the
# arithmetic of the next unit in the same pass; all of the pass, in the last or first micro-batch.
Behind = Literal["nothing", "product", "attention", "next unit", "pass"]


@dataclass(frozen=True, kw_only=True)
class UnitMessage:
    """Equal messages of one kind of unit.

    Attributes:
        axis, collective, purpose: see `core.message.Message`.
        among: the ranks that take part.
        bytes: of the full vector; a column.
        times: per unit and micro-batch, or per unit and step; a column, 0 in rows without it.
        when: the pass.
        unit: what it is counted by.
        share: which of the blocks of a segment send it.
        behind: what may hide it.
        together: all units of a rank send it as one message, of all their bytes.
    """

    axis: Axis
    among: Among
    collective: Collective
    purpose: str
    bytes: Integers | Floats
    times: Integers
    when: Pass
    unit: Place
    share: Share = "all"
    behind: Behind = "nothing"
    together: bool = False


@dataclass(frozen=True)
class Setting:
    """What every axis looks at.

    Attributes:
        table: the layouts.
        model: the operators of their model.
        at: the coordinates along tp and cp of the rank that sends; the first has the most.
        held: what its pipeline rank holds.
        element: bytes of an activation.
        wide: bytes of a gradient as it is added up and reduced.
        pads: units are padded so that they divide over the ranks that share them.
    """

    table: Table
    model: ModelOperators
    at: Coordinates
    held: Holdings
    element: int
    wide: int
    pads: bool = True

    @cached_property
    def tokens(self) -> Integers:
        """Of one micro-batch on one cp rank, padding included."""
        return self.table.tokens

    @cached_property
    def sizes(self) -> tuple[UnitSize, ...]:
        """Every kind of unit as the rank holds it."""
        return tuple(unit_sizes(self.table, self.model, self.at.tp))

    @cached_property
    def by_segment(self) -> Booleans:
        """Where whole blocks are computed again."""
        return self.table.recompute.test(lambda recompute: recompute.segment > 0)

    @cached_property
    def reduces_every(self) -> Booleans:
        """Where the gradients of every micro-batch are reduced by themselves."""
        return self.table.reduces_every


def padded(elements: Integers, parts: Integers) -> Integers:
    """Elements with the padding that makes them divide over so many ranks.

    Args:
        elements: of a unit on one rank, a column.
        parts: ranks that share it, a column. Experts that take ranks from tp too may be on no two
            ranks of dp: 0 counts as 1.

    Example:
        >>> padded(np.array([10, 10]), np.array([4, 0]))
        array([12, 10])
    """
    whole = np.maximum(parts, 1)
    return -(-elements // whole) * whole
