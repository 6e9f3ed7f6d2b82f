"""One micro-batch through each unit, for all meshes of a search: priced once for what differs.

Kernels, and messages of the tensor axis, depend on few columns: on tp, on the tokens of a
micro-batch, and on how experts are cut. Context and expert messages depend on cp and on where ranks
stand as well. So the formulas of `planner/units.py` are asked twice, for two small tables.
"""

from dataclasses import dataclass, replace

import numpy as np

from phalanx.core.errors import UsageError
from phalanx.core.operator import UnitName
from phalanx.cost.block_memory import PAIRS, BlockMemory
from phalanx.cost.compute import Passes
from phalanx.cost.groups import Routes
from phalanx.cost.holdings import Holdings
from phalanx.cost.messages.frameworks import messages_of
from phalanx.cost.ranks import ParameterCounts
from phalanx.cost.saved import Stack
from phalanx.cost.table import Choice, Floats, Integers, Table
from phalanx.planner.columns import different
from phalanx.planner.space import Rows, Space
from phalanx.planner.units import (
    ATTENTION,
    INSIDE_AXES,
    Load,
    Units,
    added_up,
    hop_seconds,
    starved,
)

Seconds = dict[UnitName, Passes]
_REST = "all else"
_BETWEEN = ("context", "expert")


@dataclass(frozen=True)
class UnitTables:
    """Seconds of units, as arrays of shape (passes, meshes that differ, sp, recomputations).

    Attributes:
        units: of each unit; of a head twice, where it stands alone, and where it is tied to an
            embedding on the same rank.
        place: of every mesh of the search among those that differ.
        hop: seconds to carry one tensor to the next rank, of shape (meshes, sp).
    """

    units: dict[str, Floats]
    place: Integers
    hop: Floats

    @classmethod
    def of(cls, where: Space, meshes: Rows) -> "UnitTables":
        """Price the units of some meshes.

        Raises:
            UsageError: attention is not fused; then a block does not depend on its tokens alone.
        """
        framework = where.workload.framework
        if not framework.fused_attention:
            raise UsageError(
                f"{framework.name} keeps attention scores in memory, which the search cannot "
                "price; phalanx estimate prices one layout of it"
            )
        kernels = _Kernels(where, meshes.table)
        keys = [kernels.place, meshes.table.cp]
        if where.workload.shape.is_moe:
            group = Routes(meshes.table, framework, where.workload.fabric).group("ep")
            reach = np.broadcast_to(group.inside(where.workload.fabric), kernels.place.shape)
            keys.append(reach)
            if where.workload.fabric.torus:
                keys.append(np.broadcast_to(group.stride, kernels.place.shape))
        first, place = different(keys)
        table = _spread(where, meshes.table.take(first))
        units = kernels.with_messages(table, kernels.place[first])
        return cls(units, place, _hops(where, meshes.table))

    def seconds(self, rows: Rows, together: Integers) -> Seconds:
        """One micro-batch through each unit of every row, of shape (rows, 1).

        Args:
            rows: layouts.
            together: 1 where embedding and head are on one rank.
        """
        mesh, sp, mode = self.place[rows.mesh], rows.table.sp * 1, rows.table.recompute.codes

        def of(unit: str) -> Floats:
            found: Floats = self.units[unit][:, mesh, sp, mode][:, :, None]
            return found

        head = of("head")
        if np.any(together):
            head = np.where(together[None, :, None] > 0, of("tied head"), head)
        names: list[UnitName] = ["embedding", "dense block"]
        names += ["routed block"] if "routed block" in self.units else []
        return {**{name: Passes(*of(name)) for name in names}, "head": Passes(*head)}

    def hops(self, rows: Rows) -> Floats:
        """Seconds to carry one tensor to the next rank, of shape (rows, 1)."""
        found: Floats = self.hop[rows.mesh, rows.table.sp * 1][:, None]
        return found


def ends(together: int) -> Holdings:
    """Of a pipeline, only whether its embedding and its head are on one rank."""
    return Holdings({}, np.array(1), np.array(together > 0))


def _hops(where: Space, table: Table) -> Floats:
    workload, tall = where.workload, table.tall
    table = replace(tall, sp=np.array([[False, True]]) & (tall.tp > 1))
    messages = messages_of(table, workload.framework, axes=("pipeline",), held=ends(0))
    routes = Routes(table, workload.framework, workload.fabric)
    return np.broadcast_to(hop_seconds(messages, routes), (len(tall.dp), 2))


@dataclass(frozen=True)
class BlockTables:
    """What one block saves and makes, for all meshes of a search: found once for what differs.

    Attributes:
        pairs: by name, of a block without and with experts; of shape (meshes that differ, sp,
            recomputations).
        place: of every mesh of the search among those that differ.
        stack: what the program keeps.
    """

    pairs: dict[str, tuple[Floats, Floats]]
    place: Integers
    stack: Stack

    @classmethod
    def of(cls, where: Space, meshes: Rows) -> "BlockTables":
        """Size the blocks of some meshes."""
        table, stack = meshes.table, where.workload.framework.stack
        first, place = different([table.tp, table.cp, table.mb])
        blocks = BlockMemory(_spread(where, table.take(first)), stack)
        shape = (len(first), 2, len(where.modes))
        pairs = {}
        for name in PAIRS:
            dense, routed = getattr(blocks, name)
            pairs[name] = np.broadcast_to(dense, shape), np.broadcast_to(routed, shape)
        return cls(pairs, place, stack)

    def blocks(self, rows: Rows) -> BlockMemory:
        """Those of every row, of shape (rows, 1)."""
        at = self.place[rows.mesh], rows.table.sp * 1, rows.table.recompute.codes
        pairs = {
            name: (dense[at][:, None], routed[at][:, None])
            for name, (dense, routed) in self.pairs.items()
        }
        return BlockMemory.known(rows.table.tall, self.stack, pairs)


class _Kernels:
    """Kernels and tensor messages of each unit, in a table of what they depend on."""

    def __init__(self, where: Space, table: Table) -> None:
        self._where = where
        keys = [table.tp, table.mb * (table.recipe.seq // table.cp)]
        if where.workload.shape.is_moe:
            keys += [table.ep, (table.dp * table.cp % table.ep != 0) * 1]
        first, self.place = different(keys)
        small = _spread(where, table.take(first))
        units = self._units(small, together=0)
        self.loads: dict[str, tuple[Floats, Floats, Floats]] = {
            unit: _load(units, unit) for unit in _units_of(where)
        }
        self.loads["tied head"] = _load(self._units(small, together=1), "head")

    def _units(self, table: Table, *, together: int) -> Units:
        workload = self._where.workload
        routes = Routes(table, workload.framework, workload.fabric)
        params = ParameterCounts.of(table, np.array(together))
        messages = messages_of(table, workload.framework, axes=INSIDE_AXES, held=ends(together))
        return Units(workload, table, params, messages, routes)

    def with_messages(self, table: Table, place: Integers) -> dict[str, Floats]:
        """Add the messages between blocks, and wait for kernels to be launched."""
        workload, units = self._where.workload, self._units(table, together=0)
        shape = (len(place), 2, len(self._where.modes))
        found: dict[str, Floats] = {}
        for name, columns in self.loads.items():
            rest, attention, launches = (Passes(*part[:, place]) for part in columns)
            load = Load({_REST: rest, ATTENTION: attention}, {}, launches)
            unit: UnitName = "routed block" if name == "routed block" else "dense block"
            if name == unit:
                load = units.with_messages(unit, load, _BETWEEN)
            total = added_up(load.terms.values()).plus(starved(workload, load))
            found[name] = np.stack([np.broadcast_to(column, shape) for column in total])
        return found


def _units_of(where: Space) -> list[UnitName]:
    units: list[UnitName] = ["embedding", "dense block", "head"]
    return [*units, "routed block"] if where.workload.shape.is_moe else units


def _spread(where: Space, table: Table) -> Table:
    """The same meshes with sp off and on, and every recomputation: of shape (meshes, 2, modes)."""
    sp = np.array([False, True]).reshape(1, -1, 1) & (table.tp.reshape(-1, 1, 1) > 1)
    modes = Choice(where.modes, np.arange(len(where.modes)).reshape(1, 1, -1))
    return replace(table.of_shape(-1, 1, 1), sp=sp, recompute=modes)


def _load(units: Units, unit: UnitName) -> tuple[Floats, Floats, Floats]:
    """All but attention, attention, and launches of a unit, each of shape (passes, table)."""
    load = units.load(unit, axes=tuple(axis for axis in INSIDE_AXES if axis not in _BETWEEN))
    attention = load.terms.pop(ATTENTION)
    parts = (added_up(load.terms.values()), attention, load.launches)
    shape = np.broadcast_shapes(
        units.table.tp.shape, units.table.sp.shape, units.table.recompute.codes.shape
    )
    stacked = (np.stack([np.broadcast_to(column, shape) for column in part]) for part in parts)
    rest, scores, launches = stacked
    return rest, scores, launches
