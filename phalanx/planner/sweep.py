"""Goes through every layout of a search: counts what is refused, prices the rest."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from phalanx.catalog.sustained import sustained
from phalanx.core.cluster import Cluster
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import BF16, Precision
from phalanx.cost.practice import PHALANX, Practice
from phalanx.planner.bulk_memory import Held, Ledger
from phalanx.planner.bulk_moments import RankBytes
from phalanx.planner.bulk_time import Steps, least_seconds, step_seconds
from phalanx.planner.bulk_units import UnitTables
from phalanx.planner.candidates import (
    MEMORY,
    Choices,
    Limits,
    choices,
    meshes,
    refuse_degrees,
    refuse_schedules,
    shardings,
    space,
)
from phalanx.planner.columns import Booleans, Floats, Integers, Rows, Sharding
from phalanx.planner.question import Question, peak_of

BLOCK = 1 << 16  # layouts at once: their columns stay in the cache


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is looked for.

    Attributes:
        shape: the model.
        cluster: the devices; their memory is what a layout may use.
        seq: tokens per sequence.
        batch: sequences per step.
        limits: allowed values by key of the layout.
        precision: of the matrix products.
        practice: what the program does.
        top: how many meshes are wanted.
    """

    shape: ModelShape
    cluster: Cluster
    seq: int
    batch: int
    limits: Limits = field(default_factory=dict)
    precision: Precision = BF16
    practice: Practice = PHALANX
    top: int = 10

    @property
    def capacity(self) -> float:
        """Bytes of one device."""
        return self.cluster.accelerator.memory

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq * self.batch


class Block(NamedTuple):
    """Some rows with one ZeRO stage, and their prices; tables are of shape (rows, shards)."""

    rows: Rows
    sharding: Sharding
    seconds: Floats
    fits: Booleans


class Smallest(NamedTuple):
    """The layout that needs the least memory, and how much."""

    layout: Layout
    bytes: float


class _Sized(NamedTuple):
    """Rows and what they hold; columns are of shape (rows, 1), but for those of `rows`."""

    rows: Rows
    held: Held
    ranks: tuple[RankBytes, ...]

    def take(self, which: Integers) -> "_Sized":
        """Some of the rows."""
        held = Held(*(getattr(self.held, part.name)[which] for part in fields(self.held)))
        return _Sized(self.rows.take(which), held, tuple(r.take(which) for r in self.ranks))


class Sweep:
    """All layouts of a request.

    Attributes:
        considered: layouts that divide; complete, as all counts are, at the end of `priced`.
        refused: how many of them are refused, by reason.
        feasible: how many fit.
        bar: seconds; whoever takes blocks may lower it, and what cannot be faster is counted from
            then on, but not priced.

    Raises:
        RefusedError: a limit leaves nothing that divides, or the devices lack the number format.
    """

    def __init__(self, request: Request) -> None:
        shape, cluster, seq, batch = request.shape, request.cluster, request.seq, request.batch
        base = Layout(precision=request.precision)
        rates = sustained(cluster.accelerator.name)
        peak_of(cluster, request.precision, rates)
        self.request = request
        self.where = space(shape, cluster.count, (seq, batch), base.precision, request.limits)
        self.question = Question(shape, cluster, base, seq, batch, request.practice, rates)
        self.ledger = Ledger(self.where, request.practice)
        self._meshes = meshes(self.where)
        whole = self._meshes.take(seq % self._meshes.cp == 0)
        tokens = whole.mb * (seq // whole.cp)
        self.units = UnitTables(self.where, self.question, tokens)
        self.refused: Counter[str] = Counter()
        self.considered = self.feasible = 0
        self.bar = math.inf

    def priced(self) -> Iterator[Block]:
        """Price what fits."""
        for sized, options in self._sized():
            few = self._fitting(sized, sum(option.shards.size for option in options))
            if not len(few.rows):
                continue
            units = self.units.price(few.rows)
            steps = Steps(self.question, self.ledger, few.rows.tall, units, few.held, few.ranks)
            least = least_seconds(steps)
            for sharding in options:
                yield from self._priced(steps, sharding, least)

    def smallest(self) -> Smallest | None:
        """The layout that needs the least memory; None if everything is refused before."""
        best: Smallest | None = None
        for sized, options in self._sized():
            for sharding in options:
                peaks = self.ledger.worst(sized.rows.tall, sized.ranks, sharding)
                row, shard = np.unravel_index(int(peaks.argmin()), peaks.shape)
                if best is None or peaks[row, shard] < best.bytes:
                    size = int(sharding.shards[0, shard])
                    layout = self.where.layout(sized.rows, int(row), sharding.zero, size)
                    best = Smallest(layout, float(peaks[row, shard]))
        return best

    def _sized(self) -> Iterator[tuple[_Sized, list[Sharding]]]:
        """Everything that the model and the schedules allow, with the ways to shard it."""
        rows = self._meshes
        more = choices(self.where, rows)
        weights = more.weights(rows)
        self.considered = int(weights.sum())
        rows = self._sieve(rows, weights, refuse_degrees(self.where, rows))
        for dp in _from_the_middle(np.unique(rows.dp).tolist()):
            options = shardings(dp, self.where.limits)
            if not options:
                continue
            full = self._expanded(rows.take(rows.dp == dp), more)
            step = max(BLOCK // max(option.shards.size for option in options), 1)
            for first in range(0, len(full), step):
                block = full.take(np.arange(first, min(first + step, len(full))))
                yield self._size(block), options

    def _expanded(self, rows: Rows, more: Choices) -> Rows:
        """Every schedule, recomputation and sp; equal schedules stand together."""
        rows = more.add_schedules(rows)
        weights = more.weights_of_schedules(rows)
        rows = self._sieve(rows, weights, refuse_schedules(self.where, rows))
        schedules = list(dict.fromkeys(v.schedule for v in self.where.variants))
        names = np.array([schedules.index(v.schedule) for v in self.where.variants])
        together = np.argsort(names[rows.variant], kind="stable")
        return more.add_switches(rows.take(together))

    def _sieve(self, rows: Rows, weights: Integers, reasons: Mapping[str, Booleans]) -> Rows:
        """Drop what is refused, and count all that it stands for."""
        left = np.ones(len(rows), dtype=np.bool_)
        for reason, refused in reasons.items():
            self.refused[reason] += int(weights[refused & left].sum())
            left &= ~refused
        return rows.take(left)

    def _size(self, rows: Rows) -> _Sized:
        tall = rows.tall
        held = self.ledger.held(tall)
        return _Sized(rows, held, self.ledger.count(tall, held))

    def _fitting(self, sized: _Sized, weight: int) -> _Sized:
        """What no ZeRO stage would make fit is refused, with all of them."""
        least = self.ledger.least(sized.rows.tall, sized.ranks)[:, 0]
        fits = np.flatnonzero(least <= self.request.capacity)
        self.refused[MEMORY] += weight * (len(least) - len(fits))
        return sized if len(fits) == len(least) else sized.take(fits)

    def _priced(self, steps: Steps, sharding: Sharding, least: Floats) -> Iterator[Block]:
        peaks = self.ledger.worst(steps.rows, steps.ranks, sharding)
        fits: Booleans = peaks <= self.request.capacity
        self.feasible += int(fits.sum())
        self.refused[MEMORY] += int(fits.size - fits.sum())
        rows = np.flatnonzero(fits.any(axis=1) & (least < self.bar))
        if len(rows) < len(fits):
            steps, fits = steps.take(rows), fits[rows]
        if len(rows):
            yield Block(steps.rows.flat, sharding, step_seconds(steps, sharding), fits)


def _from_the_middle(values: list[int]) -> list[int]:
    """The middle of ascending values first: a good layout is found soon, and many need no price."""
    places = range(len(values))
    return [values[place] for place in sorted(places, key=lambda i: abs(2 * i - len(values)))]
