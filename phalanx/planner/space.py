"""Every layout that divides the devices and the batch, and what refuses it.

Layouts are rows of a table. Columns are added one after the other, and rows that no value of the
next columns could save are dropped at once, so each refusal is counted with all that it stands for.

Symbols: p pipeline ranks, m micro-batches per step and rank, v chunks per rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.layout import DEFAULT_SCHEDULE, Layout
from phalanx.core.recompute import MODES, Recompute
from phalanx.cost.refusals import refused
from phalanx.cost.table import Booleans, Choice, Column, Integers, Table, Which
from phalanx.planner.columns import Ragged
from phalanx.planner.workload import Workload
from phalanx.schedules.registry import SPECS, find_schedule
from phalanx.schedules.sizes import ONE

SEARCHED = tuple(spec.name for spec in SPECS if spec.can_be_searched)

# What a search goes through completely; what it varies of the best, see `planner/refine.py`.
COMPLETE = (
    *("dp", "pp", "tp", "cp", "ep", "zero", "shard"),
    *("v", "schedule", "mb", "recompute", "sp"),
)

MEMORY = "more memory than a device has"

Limits = Mapping[str, frozenset[object]]  # the values that a key of the layout may have


# The keys by which layouts are told apart, in the order in which they are settled.
_OTHER = frozenset(f.name for f in fields(Layout)) - {*COMPLETE}
DEGREES = frozenset({"dp", "pp", "tp", "cp", "ep", "mb"}) | _OTHER
SCHEDULES = frozenset({"schedule", "v"})
SWITCHES = frozenset({"recompute", "sp"})
SHARDINGS = frozenset({"zero", "shard"})


class Sharding(NamedTuple):
    """A ZeRO stage, and the numbers of ranks that may share one sharded copy, of shape (1, n)."""

    zero: int
    shards: Integers


class Variant(NamedTuple):
    """A schedule for one number of pipeline ranks, with its chunks per rank."""

    schedule: str
    pp: int
    v: int

    @property
    def num_stages(self) -> int:
        """Slices of layers, p v."""
        return self.pp * self.v

    @property
    def layout(self) -> Layout:
        """A layout that has only this."""
        return Layout(pp=self.pp, v=self.asked_v, schedule=self.schedule)

    @property
    def asked_v(self) -> int:
        """What a layout says as v: 0 where the schedule leaves no choice."""
        return 0 if find_schedule(self.schedule).chunks.fixed else self.v


@dataclass(frozen=True)
class Rows:
    """Layouts that are not yet sharded.

    Attributes:
        table: their keys, in columns of shape (rows,).
        variant: place in `Space.variants`: schedule and v.
        mesh: place among the meshes, for what depends on degrees and micro-batch alone.
    """

    table: Table
    variant: Integers
    mesh: Integers

    def __len__(self) -> int:
        return len(self.mesh)

    def take(self, which: Which, **columns: Any) -> "Rows":
        """Some of the rows, or some of them several times, with new values in some columns."""
        variant = columns.pop("variant", None)
        return Rows(
            self.table.take(which, **columns),
            self.variant[which] if variant is None else variant,
            self.mesh[which],
        )


@dataclass(frozen=True)
class Space:
    """All layouts of a workload.

    Attributes:
        workload: what is trained, and on what.
        limits: what the user has settled.
        variants: schedules by pipeline ranks.
    """

    workload: Workload
    limits: Limits
    variants: tuple[Variant, ...]

    def refused(
        self, table: Table, known: frozenset[str], new: frozenset[str]
    ) -> Iterator[tuple[str, Booleans]]:
        """Which rows cannot be, by reason, once more keys are settled.

        Args:
            table: layouts of which the keys `known` and `new` are settled.
            known: keys by which these layouts have been asked before.
            new: keys that are settled since.
        """
        return refused(table, known, new, ours=self.workload.framework.sends_as_ledger)

    @cached_property
    def modes(self) -> tuple[Recompute, ...]:
        """Recomputations that are looked at completely: those of the papers, or what is settled."""
        asked = self.limits.get("recompute", frozenset(MODES))
        others = (mode for mode in sorted(asked, key=str) if isinstance(mode, Recompute))
        return tuple(mode for mode in MODES if mode in asked) or tuple(others)

    def values(self, key: str) -> list[int]:
        """The degrees of tp or ep that the model can be cut into, ascending."""
        shape, devices = self.workload.shape, self.workload.cluster.count
        most = {"tp": shape.heads, "ep": max(shape.experts, 1)}[key]
        wholes = divisors(most)
        if key == "tp":
            wholes = tuple(value for value in wholes if devices % value == 0)
        return allowed(key, wholes, self.limits)

    def layout(self, rows: Rows, index: int, zero: int = 0, shard: int = 0) -> Layout:
        """One row as a value, with the keys that rows do not have as the limits settle them.

        Args:
            rows: some of this space.
            index: of the row.
            zero: its ZeRO stage, which rows do not have yet.
            shard: ranks that share one sharded copy; all of dp are written as 0.
        """
        variant, table = self.variants[rows.variant[index]], rows.table

        def at(column: Column) -> int:
            return int(column[index if len(column) > 1 else 0])

        keys = ("dp", "tp", "cp", "ep", "mb")
        degrees: dict[str, Any] = {key: at(getattr(table, key)) for key in keys}
        tp, sp = degrees["tp"], at(table.sp)
        return replace(
            base_layout(self.limits),
            **degrees,
            pp=variant.pp,
            zero=zero,
            shard=0 if shard == degrees["dp"] else shard,
            v=variant.asked_v,
            schedule=variant.schedule,
            recompute=table.recompute.values[at(table.recompute.codes)],
            precision=self.workload.precision,
            sp=None if sp or tp == 1 else False,
        )


def base_layout(limits: Limits) -> Layout:
    """The values of the keys that a search does not go through completely: as limits settle them.

    Of several that are allowed, the default if it is one of them, else the first in order.
    """
    default, settled = Layout(), dict[str, Any]()
    for key in _OTHER & set(limits):
        if getattr(default, key) not in limits[key]:
            settled[key] = min(limits[key], key=str)
    return replace(default, **settled)


def space(workload: Workload, limits: Limits) -> Space:
    """Put the bounds of a search together.

    Args:
        workload: what is trained, and on what.
        limits: allowed values by key; a key that is missing may have any.

    Raises:
        RefusedError: a limit leaves nothing that divides.
    """
    devices, batch = workload.cluster.count, workload.batch
    for key in ("dp", "pp", "tp", "cp"):
        _require_some(key, divisors(devices), limits, f"{devices} devices")
    _require_some("mb", divisors(batch), limits, f"a batch of {batch} sequences")
    layers = workload.shape.layers
    variants = tuple(v for pp in divisors(devices) for v in _variants(pp, layers, limits))
    return Space(workload, limits, variants)


def _require_some(key: str, values: Sequence[int], limits: Limits, what: str) -> None:
    if not allowed(key, values, limits):
        asked = shorten(sorted(int(str(value)) for value in limits[key]))
        raise RefusedError(f"{key}={asked} does not divide {what}; {key} can be {shorten(values)}")


def allowed(key: str, values: Sequence[int], limits: Limits) -> list[int]:
    """Those of the values that a key may have, in their order.

    Args:
        key: of a layout.
        values: that divide what they have to.
        limits: allowed values by key; a key that is missing may have any.
    """
    return [value for value in values if key not in limits or value in limits[key]]


def _variants(pp: int, layers: int, limits: Limits) -> Iterator[Variant]:
    """Schedules over `pp` ranks; on a single rank they are all the same."""
    asked = limits.get("schedule", SEARCHED)
    names = [str(name) for name in sorted(asked, key=_place)]
    if pp == 1:
        plain = [name for name in names if find_schedule(name).chunks == ONE]
        names = [DEFAULT_SCHEDULE] if DEFAULT_SCHEDULE in plain else plain[:1]
    for name in names:
        chunks = find_schedule(name).chunks
        most = max(layers // pp, 1) if chunks.most is None else chunks.most
        for v in allowed("v", range(chunks.least, most + 1), limits):
            yield Variant(name, pp, v)


def _place(name: object) -> tuple[int, str]:
    """Schedules in the order of the registry, those from elsewhere behind."""
    return (SEARCHED.index(name) if name in SEARCHED else len(SEARCHED)), str(name)


def shardings(dp: int, limits: Limits) -> list[Sharding]:
    """Every ZeRO stage over every number of ranks that differs.

    Nothing is sharded where no two ranks share a copy, and every stage is then the same.

    Args:
        dp: replicas.
        limits: allowed values by key, of which zero and shard count.

    Example:
        >>> found = shardings(4, {"zero": frozenset({0, 3})})
        >>> [(sharding.zero, sharding.shards.tolist()) for sharding in found]
        [(0, [[4]]), (3, [[4, 2]])]
    """
    shards = allowed("shard", divisors(dp), limits)
    stages = allowed("zero", (0, 1, 2, 3), limits)
    if dp == 1:
        stages = [0] if shards and stages else []
    several = [shard for shard in reversed(shards) if shard > 1]  # of equal ones the first counts
    sizes = {0: [dp] if dp in shards else [], 1: several, 2: several, 3: several}
    return [
        Sharding(zero, np.array([sizes[zero]], dtype=np.int64)) for zero in stages if sizes[zero]
    ]


@dataclass(frozen=True)
class Choices:
    """The columns that are still to be added, by the column that they depend on."""

    space: Space
    variants: Ragged  # by pp: place in the space
    shards: Ragged  # by dp: as many values as there are shardings
    switches: Ragged  # by whether tp > 1: sp

    def weights(self, rows: Rows) -> Integers:
        """How many layouts each row with degrees and mb stands for."""
        return self.variants.counts(rows.table.pp) * self.weights_of_schedules(rows)

    def weights_of_schedules(self, rows: Rows) -> Integers:
        """How many layouts each row stands for once it has a schedule, too."""
        modes = len(self.space.modes) * self.switches.counts(_cut(rows))
        return modes * self.shards.counts(rows.table.dp)

    def add_schedules(self, rows: Rows) -> Rows:
        """Every schedule for every row; equal schedules stand together."""
        parents, variant = self.variants.cross(rows.table.pp)
        names = tuple(dict.fromkeys(v.schedule for v in self.space.variants))
        codes = np.array([names.index(v.schedule) for v in self.space.variants])[variant]
        order = np.argsort(codes, kind="stable")
        chunks = np.array([v.v for v in self.space.variants])[variant]
        schedule = Choice(names, codes[order])
        return rows.take(parents[order], variant=variant[order], schedule=schedule, v=chunks[order])

    def add_switches(self, rows: Rows) -> Rows:
        """Every recomputation, and sequence parallelism on and off, for every row."""
        parents, sp = self.switches.cross(_cut(rows))
        modes = len(self.space.modes)
        repeated, codes = np.repeat(parents, modes), np.tile(np.arange(modes), len(parents))
        recompute = Choice(self.space.modes, codes)
        on = np.repeat(sp, modes) > 0
        return rows.take(repeated, sp=on & (rows.table.tp[repeated] > 1), recompute=recompute)


def choices(where: Space, rows: Rows) -> Choices:
    """What can be added to rows with degrees.

    Args:
        where: the search.
        rows: of which only dp and pp are read: the lists are kept by their values.
    """
    limits, table = where.limits, rows.table
    by_pp: dict[int, list[int]] = {int(pp): [] for pp in np.unique(table.pp)}
    for place, variant in enumerate(where.variants):
        by_pp.setdefault(variant.pp, []).append(place)
    by_dp = {
        dp: [0] * sum(option.shards.size for option in shardings(dp, limits))
        for dp in np.unique(table.dp).tolist()
    }
    wanted = limits.get("sp", (True, False))
    both = [int(on) for on in (True, False) if on in wanted]
    return Choices(where, Ragged(by_pp), Ragged(by_dp), Ragged({0: [0], 1: both}))


def _cut(rows: Rows) -> Integers:
    return (rows.table.tp > 1).astype(np.int64)


def meshes(where: Space) -> Rows:
    """Degrees and micro-batch sizes that divide the devices and the batch."""
    devices, batch, limits = where.workload.cluster.count, where.workload.batch, where.limits
    options = divisors(devices)
    pp, tp = _pairs(allowed("pp", options, limits), allowed("tp", options, limits), devices)
    left, cp = _cross_divisors(devices // (pp * tp), allowed("cp", options, limits))
    pp, tp = pp[left], tp[left]
    dp = devices // (pp * tp * cp)
    some = np.isin(dp, allowed("dp", options, limits)) & (batch % dp == 0)
    columns = {"dp": dp[some], "pp": pp[some], "tp": tp[some], "cp": cp[some]}
    if where.workload.shape.is_moe:
        none = np.zeros(len(columns["dp"]), dtype=np.int64)
        parents, ep = Ragged({0: where.values("ep")}).cross(none)
        columns = {key: column[parents] for key, column in columns.items()} | {"ep": ep}
    sizes = {
        int(d): allowed("mb", divisors(batch // int(d)), limits) for d in np.unique(columns["dp"])
    }
    parents, mb = Ragged(sizes).cross(columns["dp"])
    columns = {key: column[parents] for key, column in columns.items()} | {"mb": mb}
    table = _with_defaults(where.workload, limits, columns)
    place = np.arange(len(mb))
    return Rows(table, np.zeros_like(place), place)


def _with_defaults(workload: Workload, limits: Limits, columns: dict[str, Integers]) -> Table:
    """A table of which only some columns are settled; the others have the value of a layout."""
    default = workload.table([replace(base_layout(limits), precision=workload.precision)])
    settled: dict[str, Any] = {**columns, "shards": columns["dp"]}
    return replace(default, **settled)


def _pairs(pps: Sequence[int], tps: Sequence[int], devices: int) -> tuple[Integers, Integers]:
    pp, tp = (grid.ravel() for grid in np.meshgrid(pps, tps, indexing="ij"))
    divide = devices % (pp * tp) == 0
    return pp[divide].astype(np.int64), tp[divide].astype(np.int64)


def _cross_divisors(wholes: Integers, parts: Sequence[int]) -> tuple[Integers, Integers]:
    """For each whole, those of the parts that divide it: its place, and the part."""
    place, part = np.nonzero(wholes[:, None] % np.array(parts, dtype=np.int64)[None] == 0)
    return place, np.array(parts, dtype=np.int64)[part]
