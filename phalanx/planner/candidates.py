"""Every layout that divides the devices and the batch, and what refuses it.

Layouts are rows of tables (`planner/columns.py`). Columns are added one after the other, and rows
that no value of the next columns could save are dropped at once, so each refusal is counted with
all that it stands for.

Symbols: p pipeline ranks, m micro-batches per step and rank, v chunks per rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.core.errors import RefusedError, divisors, shorten
from phalanx.core.layout import DEFAULT_SCHEDULE, Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import Precision
from phalanx.core.recompute import MODES
from phalanx.planner.columns import Booleans, Integers, Ragged, Rows, Sharding, rows_of_degrees
from phalanx.schedules.registry import SPECS, find_schedule
from phalanx.schedules.sizes import ONE

SEARCHED = tuple(spec.name for spec in SPECS if spec.can_be_searched)

# What a search varies; every other key of a layout keeps its default.
VARIED = (
    *("dp", "pp", "tp", "cp", "ep", "zero", "shard"),
    *("v", "schedule", "mb", "recompute", "sp", "precision"),
)

HEADS = "tp does not divide the heads"
EXPERTS = "ep does not divide the experts, or the ranks that share them"
SEQUENCE = "cp does not divide the sequence"
LAYERS = "more pipeline stages than layers"
SCHEDULE = "the schedule needs other numbers of ranks and micro-batches"
MEMORY = "more memory than a device has"

Limits = Mapping[str, frozenset[object]]  # the values that a key of the layout may have


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
class Space:
    """All layouts of a model on some devices with a global batch.

    Attributes:
        shape: the model.
        devices: how many.
        seq: tokens per sequence.
        batch: sequences per step.
        precision: of the matrix products, the same for all.
        limits: what the user has settled.
        variants: schedules by pipeline ranks.
    """

    shape: ModelShape
    devices: int
    seq: int
    batch: int
    precision: Precision
    limits: Limits
    variants: tuple[Variant, ...]

    def values(self, key: str) -> list[int]:
        """The degrees of tp or ep that the model can be cut into, ascending."""
        most = {"tp": self.shape.heads, "ep": max(self.shape.experts, 1)}[key]
        wholes = divisors(most)
        if key == "tp":
            wholes = tuple(value for value in wholes if self.devices % value == 0)
        return _allowed(key, wholes, self.limits)

    def layout(self, rows: Rows, index: int, zero: int = 0, shard: int = 0) -> Layout:
        """One row as a value."""
        variant = self.variants[rows.variant[index]]
        return Layout(
            dp=int(rows.dp[index]),
            pp=variant.pp,
            tp=int(rows.tp[index]),
            cp=int(rows.cp[index]),
            ep=int(rows.ep[index]),
            zero=zero,
            shard=0 if shard == rows.dp[index] else shard,
            v=variant.asked_v,
            schedule=variant.schedule,
            mb=int(rows.mb[index]),
            recompute=MODES[rows.recompute[index]],
            precision=self.precision,
            sp=None if rows.sp[index] or rows.tp[index] == 1 else False,
        )


def space(
    shape: ModelShape, devices: int, step: tuple[int, int], precision: Precision, limits: Limits
) -> Space:
    """Put the bounds of a search together.

    Args:
        shape: the model.
        devices: how many.
        step: tokens per sequence, and sequences per step.
        precision: of the matrix products.
        limits: allowed values by key; a key that is missing may have any.

    Raises:
        RefusedError: a limit leaves nothing that divides.
    """
    seq, batch = step
    for key in ("dp", "pp", "tp", "cp"):
        _require_some(key, divisors(devices), limits, f"{devices} devices")
    _require_some("mb", divisors(batch), limits, f"a batch of {batch} sequences")
    variants = [v for pp in divisors(devices) for v in _variants(pp, shape.layers, limits)]
    return Space(shape, devices, seq, batch, precision, limits, tuple(variants))


def _require_some(key: str, values: Sequence[int], limits: Limits, what: str) -> None:
    if not _allowed(key, values, limits):
        asked = shorten(sorted(int(str(value)) for value in limits[key]))
        raise RefusedError(f"{key}={asked} does not divide {what}; {key} can be {shorten(values)}")


def _allowed(key: str, values: Sequence[int], limits: Limits) -> list[int]:
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
        for v in _allowed("v", range(chunks.least, most + 1), limits):
            yield Variant(name, pp, v)


def _place(name: object) -> tuple[int, str]:
    """Schedules in the order of the registry, those from elsewhere behind."""
    return (SEARCHED.index(name) if name in SEARCHED else len(SEARCHED)), str(name)


def shardings(dp: int, limits: Limits) -> list[Sharding]:
    """Every ZeRO stage over every number of ranks that differs.

    Nothing is sharded where no two ranks share a copy, and every stage is then the same.
    """
    shards = _allowed("shard", divisors(dp), limits)
    stages = _allowed("zero", (0, 1, 2, 3), limits)
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

    variants: Ragged  # by pp: place in the space
    shards: Ragged  # by dp: as many values as there are shardings
    switches: Ragged  # by whether tp > 1: sp
    recompute: Integers

    def weights(self, rows: Rows) -> Integers:
        """How many layouts each row with degrees and mb stands for."""
        return self.variants.counts(rows.pp) * self.weights_of_schedules(rows)

    def weights_of_schedules(self, rows: Rows) -> Integers:
        """How many layouts each row stands for once it has a schedule, too."""
        modes = len(self.recompute) * self.switches.counts(_cut(rows))
        return modes * self.shards.counts(rows.dp)

    def add_schedules(self, rows: Rows) -> Rows:
        """Every schedule for every row."""
        parents, variant = self.variants.cross(rows.pp)
        return rows.take(parents, variant=variant)

    def add_switches(self, rows: Rows) -> Rows:
        """Every recomputation, and sequence parallelism on and off, for every row."""
        parents, sp = self.switches.cross(_cut(rows))
        modes = len(self.recompute)
        repeated = np.repeat(parents, modes)
        modes_of = np.tile(self.recompute, len(parents))
        return rows.take(repeated, sp=np.repeat(sp, modes), recompute=modes_of)


def choices(where: Space, rows: Rows) -> Choices:
    """What can be added to rows with degrees."""
    limits = where.limits
    by_pp: dict[int, list[int]] = {int(pp): [] for pp in np.unique(rows.pp)}
    for place, variant in enumerate(where.variants):
        by_pp.setdefault(variant.pp, []).append(place)
    by_dp = {
        dp: [0] * sum(option.shards.size for option in shardings(dp, limits))
        for dp in np.unique(rows.dp).tolist()
    }
    modes = [i for i, name in enumerate(MODES) if name in limits.get("recompute", MODES)]
    wanted = limits.get("sp", (True, False))
    both = [int(on) for on in (True, False) if on in wanted]
    return Choices(
        variants=Ragged(by_pp),
        shards=Ragged(by_dp),
        switches=Ragged({0: [0], 1: both}),
        recompute=np.array(modes, dtype=np.int64),
    )


def _cut(rows: Rows) -> Integers:
    return (rows.tp > 1).astype(np.int64)


def meshes(where: Space) -> Rows:
    """Degrees and micro-batch sizes that divide the devices and the batch."""
    devices, limits = where.devices, where.limits
    options = divisors(devices)
    pp, tp = _pairs(_allowed("pp", options, limits), _allowed("tp", options, limits), devices)
    cps = _allowed("cp", options, limits)
    left, cp = _cross_divisors(devices // (pp * tp), cps)
    pp, tp = pp[left], tp[left]
    dp = devices // (pp * tp * cp)
    kept = np.isin(dp, _allowed("dp", options, limits)) & (where.batch % dp == 0)
    rows = rows_of_degrees(dp[kept], pp[kept], tp[kept], cp[kept])
    if where.shape.is_moe:
        parents, ep = Ragged({0: where.values("ep")}).cross(np.zeros(len(rows), dtype=np.int64))
        rows = rows.take(parents, ep=ep)
    sizes = {
        int(d): _allowed("mb", divisors(where.batch // int(d)), limits) for d in np.unique(rows.dp)
    }
    parents, mb = Ragged(sizes).cross(rows.dp)
    return rows.take(parents, mb=mb, m=where.batch // (rows.dp[parents] * mb))


def _pairs(pps: Sequence[int], tps: Sequence[int], devices: int) -> tuple[Integers, Integers]:
    pp, tp = (grid.ravel() for grid in np.meshgrid(pps, tps, indexing="ij"))
    divide = devices % (pp * tp) == 0
    return pp[divide].astype(np.int64), tp[divide].astype(np.int64)


def _cross_divisors(wholes: Integers, parts: Sequence[int]) -> tuple[Integers, Integers]:
    """For each whole, those of the parts that divide it: its place, and the part."""
    place, part = np.nonzero(wholes[:, None] % np.array(parts, dtype=np.int64)[None] == 0)
    return place, np.array(parts, dtype=np.int64)[part]


def refuse_degrees(where: Space, rows: Rows) -> dict[str, Booleans]:
    """Which rows with degrees the model cannot be cut into, by reason; see `question.refuse`."""
    shape = where.shape
    shared = rows.dp * rows.cp * rows.tp
    return {
        HEADS: shape.heads % rows.tp != 0,
        EXPERTS: shared % rows.ep != 0,
        SEQUENCE: where.seq % rows.cp != 0,
        LAYERS: rows.pp > shape.layers,
    }


def refuse_schedules(where: Space, rows: Rows) -> dict[str, Booleans]:
    """Which rows have a schedule that their layers or micro-batches cannot fill."""
    stages = np.array([v.num_stages for v in where.variants])[rows.variant]
    specs = [find_schedule(v.schedule) for v in where.variants]
    wrong = [not spec.ranks.hold(v.pp) for spec, v in zip(specs, where.variants, strict=True)]
    sizes = [spec.micro_batches(v.pp) for spec, v in zip(specs, where.variants, strict=True)]
    least, multiple = (np.array(column) for column in list(zip(*sizes, strict=True))[:2])
    unfit = np.array(wrong)[rows.variant] | (rows.m < least[rows.variant])
    unfit |= rows.m % multiple[rows.variant] != 0
    return {LAYERS: stages > where.shape.layers, SCHEDULE: unfit}
