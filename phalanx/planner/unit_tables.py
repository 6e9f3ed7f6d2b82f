"""One micro-batch through each unit, for all meshes of a search: priced once for what differs.

Kernels, and messages of the tensor axis, depend on few columns: on tp, on the tokens of a
micro-batch, and on how experts are cut. Context and expert messages depend on cp and on where ranks
stand as well. So the formulas of `planner/units.py` are asked twice, for two small tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
_ENDS: dict[str, UnitName] = {"embedding": "embedding", "head": "head", "tied head": "head"}


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

        Args:
            where: the search.
            meshes: degrees and micro-batch sizes, one row each.

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
        at = _at(self.place, rows, self.units["head"].shape[1:])

        def of(unit: str) -> Floats:
            return self.units[unit].reshape(3, -1).take(at, axis=1)[:, :, None]

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
        """Size the blocks of some meshes.

        Args:
            where: the search; of it the recomputations, and what the program keeps.
            meshes: degrees and micro-batch sizes, one row each.
        """
        table, stack = meshes.table, where.workload.framework.stack
        first, place = different([table.tp, table.cp, table.mb])
        blocks = BlockMemory(_spread(where, table.take(first)), stack)
        shape = (len(first), 2, len(where.modes))
        pairs = {}
        for name in PAIRS:
            dense, routed = getattr(blocks, name)
            spread = (np.ascontiguousarray(np.broadcast_to(x, shape)) for x in (dense, routed))
            pairs[name] = next(spread), next(spread)
        return cls(pairs, place, stack)

    def blocks(self, rows: Rows) -> BlockMemory:
        """Those of every row, of shape (rows, 1)."""
        at = _at(self.place, rows, self.pairs["saved"][0].shape)
        pairs = {
            name: (dense.reshape(-1).take(at)[:, None], routed.reshape(-1).take(at)[:, None])
            for name, (dense, routed) in self.pairs.items()
        }
        return BlockMemory.known(rows.table.tall, self.stack, pairs)


def _at(place: Integers, rows: Rows, shape: tuple[int, ...]) -> Integers:
    """Where rows stand in tables of shape (meshes that differ, sp, recomputations)."""
    _, switches, modes = shape
    at: Integers = (place[rows.mesh] * switches + rows.table.sp) * modes
    return at + rows.table.recompute.codes


class MeshTables:
    """What is found once for all meshes of a search.

    Args:
        where: the search.
        meshes: degrees and micro-batch sizes.
    """

    def __init__(self, where: Space, meshes: Rows) -> None:
        self._where, self._meshes = where, meshes

    @cached_property
    def units(self) -> UnitTables:
        """Seconds of units."""
        return UnitTables.of(self._where, self._meshes)

    def blocks(self, rows: Rows) -> BlockMemory:
        """What one block of every row saves and makes, of shape (rows, 1)."""
        return self._blocks.blocks(rows)

    @cached_property
    def _blocks(self) -> BlockTables:
        return BlockTables.of(self._where, self._meshes)


class _Kernels:
    """Kernels and tensor messages of each unit, in a table of what they depend on."""

    def __init__(self, where: Space, table: Table) -> None:
        self._where = where
        keys = [table.tp, table.mb * (table.recipe.seq // table.cp)]
        if where.workload.shape.is_moe:
            keys += [table.ep, (table.dp * table.cp % table.ep != 0) * 1]
        first, self.place = different(keys)
        small = _spread(where, table.take(first))
        units = self._units(small)
        self.blocks = {unit: _load(units, unit) for unit in _blocks_of(where)}
        tied = self._units(small, together=1)
        self.ends = {
            name: self._total(_load(tied if name == "tied head" else units, unit))
            for name, unit in _ENDS.items()
        }

    def _units(
        self, table: Table, *, together: int = 0, axes: Sequence[str] = INSIDE_AXES
    ) -> Units:
        workload = self._where.workload
        routes = Routes(table, workload.framework, workload.fabric)
        params = ParameterCounts.of(table, np.array(together))
        messages = messages_of(table, workload.framework, axes=axes, held=ends(together))
        return Units(workload, table, params, messages, routes)

    def with_messages(self, table: Table, place: Integers) -> dict[str, Floats]:
        """Add the messages between blocks, and wait for kernels to be launched."""
        units = self._units(table, axes=_BETWEEN)
        found = {name: total[:, place] for name, total in self.ends.items()}
        for unit, load in self.blocks.items():
            terms = {name: _rows(passes, place) for name, passes in load.terms.items()}
            here = Load(terms, {}, _rows(load.launches, place))
            found[unit] = self._total(units.with_messages(unit, here, _BETWEEN))
        return found

    def _total(self, load: Load) -> Floats:
        """Seconds of the three passes."""
        passes = added_up(load.terms.values()).plus(starved(self._where.workload, load))
        return np.stack(np.broadcast_arrays(*passes))


def _blocks_of(where: Space) -> list[UnitName]:
    return ["dense block", "routed block"] if where.workload.shape.is_moe else ["dense block"]


def _spread(where: Space, table: Table) -> Table:
    """The same meshes with sp off and on, and every recomputation: of shape (meshes, 2, modes)."""
    sp = np.array([False, True]).reshape(1, -1, 1) & (table.tp.reshape(-1, 1, 1) > 1)
    modes = Choice(where.modes, np.arange(len(where.modes)).reshape(1, 1, -1))
    return replace(table.of_shape(-1, 1, 1), sp=sp, recompute=modes)


def _load(units: Units, unit: UnitName) -> Load:
    """Attention, all else, and launches of a unit, spread over the table."""
    load = units.load(unit, axes=tuple(axis for axis in INSIDE_AXES if axis not in _BETWEEN))
    attention = load.terms.pop(ATTENTION)
    terms = {_REST: added_up(load.terms.values()), ATTENTION: attention}
    shape = np.broadcast_shapes(
        units.table.tp.shape, units.table.sp.shape, units.table.recompute.codes.shape
    )

    def spread(passes: Passes) -> Passes:
        return Passes(*(np.broadcast_to(column, shape) for column in passes))

    return Load({name: spread(part) for name, part in terms.items()}, {}, spread(load.launches))


def _rows(passes: Passes, which: Integers) -> Passes:
    return Passes(*(column[which] for column in passes))
