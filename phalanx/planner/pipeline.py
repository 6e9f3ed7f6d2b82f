"""From the first forward of a step to its last backward: the schedule played with stage costs.

Symbols: m micro-batches per step and rank, p pipeline ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phalanx.core.estimate import Term
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operator import UnitName
from phalanx.core.schedule import Kind
from phalanx.cost.compute import Passes
from phalanx.cost.table import Floats, Integers
from phalanx.planner.fast_simulation import makespans
from phalanx.planner.units import (
    ACCUMULATION,
    ATTENTION,
    LAUNCH,
    MEMORY,
    OFFLOAD,
    PRODUCTS,
    RECOMPUTE,
    UPDATES,
    WEIGHTS,
    UnitSeconds,
)
from phalanx.schedules.layouts import layers_of_stages, placement

# What the time inside the pipeline goes to, and how a report calls it.
INSIDE = {
    PRODUCTS: "matrix products",
    ATTENTION: "attention",
    MEMORY: "passes over memory",
    ACCUMULATION: "adding gradients up",
    RECOMPUTE: "recomputation",
    LAUNCH: "waiting for kernel launches",
    "tensor": "tensor axis",
    "context": "context axis",
    "expert": "expert axis",
    WEIGHTS: "weights and gradients of ZeRO",
    OFFLOAD: "waiting for offloaded activations",
    UPDATES: "updates between micro-batches",
}


def stage_counts(shape: ModelShape, layout: Layout) -> dict[UnitName, Integers]:
    """How many of each unit every stage of one copy of the model holds, arrays of shape (stages,).

    Args:
        shape: the model; its layers without experts come first.
        layout: of it pp, v, schedule and stages.

    Raises:
        RefusedError: the layers cannot fill the stages.
    """
    sizes = np.array(layers_of_stages(layout, shape.layers), dtype=np.int64)
    before = np.cumsum(sizes) - sizes
    dense_layers = shape.dense_layers if shape.is_moe else shape.layers
    dense = np.clip(dense_layers - before, 0, sizes)
    first, last = np.zeros_like(sizes), np.zeros_like(sizes)
    first[0] = last[-1] = 1
    return {
        "embedding": first,
        "dense block": dense,
        "routed block": sizes - dense,
        "head": last,
    }


@dataclass(frozen=True)
class Pipeline:
    """A pipeline with the seconds of its stages.

    Attributes:
        layout: the schedule and its sizes.
        m: micro-batches.
        terms: seconds of one micro-batch on every stage by what they go to, arrays of shape
            (passes, stages); stages of both copies, where the schedule holds the model twice.
        peak: of products and attention at the peak, likewise.
        hop: seconds to carry one tensor to the next rank.
    """

    layout: Layout
    m: int
    terms: dict[str, Floats]
    peak: dict[str, Floats]
    hop: float

    @classmethod
    def of(
        cls,
        layout: Layout,
        m: int,
        units: Mapping[UnitName, UnitSeconds],
        counts: Mapping[UnitName, Integers],
        hop: float,
    ) -> "Pipeline":
        """Stages that hold so many of each unit, in every copy of the model that the schedule has.

        Args:
            layout: the schedule and its sizes.
            m: micro-batches per rank and step.
            units: one micro-batch through each unit; of columns the largest row counts.
            counts: of each unit on every stage of one copy, of shape (stages,).
            hop: seconds to carry one tensor to the next rank.
        """
        copies = placement(layout).copies

        def stages(of_unit: Mapping[UnitName, Mapping[str, Passes]]) -> dict[str, Floats]:
            sums: dict[str, Floats] = {}
            for unit, terms in of_unit.items():
                for name, passes in terms.items():
                    each = np.outer([np.max(column) for column in passes], counts[unit])
                    sums[name] = sums.get(name, 0.0) + each
            return {name: np.tile(each, copies) for name, each in sums.items()}

        terms = stages({unit: found.terms for unit, found in units.items()})
        peak = stages({unit: found.peak for unit, found in units.items()})
        return cls(layout, m, terms, peak, hop)

    @property
    def total(self) -> Floats:
        """Seconds of one micro-batch on every stage, of shape (passes, stages)."""
        result: Floats = sum(self.terms.values(), np.zeros(()))
        return result

    @property
    def busy(self) -> Floats:
        """Seconds that every rank works in a step."""
        return self._of_ranks(self.total)

    @property
    def busiest(self) -> int:
        """The pipeline rank that works longest."""
        return int(self.busy.argmax())

    def _of_ranks(self, stages: Floats) -> Floats:
        """Seconds of a step on every rank; copies of the model share the micro-batches."""
        where = placement(self.layout)
        each = stages.sum(axis=0) * self.m / where.copies
        sums: Floats = np.bincount(
            np.array(where.ranks), weights=each, minlength=self.layout.pp
        ).astype(np.float64)
        return sums

    def seconds(self) -> float:
        """From the first forward to the last backward."""
        return float(self._play([self.total], [self.hop])[0])

    def report(self) -> tuple[tuple[Term, ...], float]:
        """What the busiest rank does all the time, and the share of it in which it is idle.

        Every part is worth what the schedule gains when it is played without it.
        """
        names = [name for name in INSIDE if name in self.terms]
        sets = [self.total, self.total, *(self._without(name) for name in names)]
        hops = [self.hop, 0.0, *[self.hop] * len(names)]
        lasts, *shorter = self._play(sets, hops).tolist()
        gains = dict(zip(("hops", *names), (lasts - time for time in shorter), strict=True))
        rank = self.busiest
        terms = [
            self._term(name, rank, gains[name])
            for name in names
            if self._of_ranks(self.terms[name])[rank] > 0
        ]
        idle = max(lasts - float(self.busy[rank]), 0.0)
        if self.layout.pp > 1:
            terms.append(_idle(idle, min(gains["hops"], idle)))
        return tuple(terms), idle / lasts

    def _without(self, name: str) -> Floats:
        """Stages without one part; products only as fast as the peak allows."""
        return self.total - self.terms[name] + self.peak.get(name, 0.0)

    def _term(self, name: str, rank: int, gain: float) -> Term:
        """One part of the work; products and attention against what the peak allows."""
        lasts, label = float(self._of_ranks(self.terms[name])[rank]), INSIDE[name]
        if name not in self.peak:
            return Term(label, lasts, worth=gain)
        ideal = float(self._of_ranks(self.peak[name])[rank])
        below = Term("below the peak", lasts - ideal, worth=gain)
        return Term(label, children=(Term("at the peak", ideal), below), worth=gain)

    def _play(self, sets: list[Floats], hops: list[float]) -> Floats:
        """Seconds of the schedule for several sets of stage costs."""
        table = np.maximum(np.stack(sets, axis=1), 0.0)  # passes x sets x stages
        if self.layout.pp == 1 and table.shape[2] == 1:
            result: Floats = self.m * np.stack(sets).sum(axis=(1, 2))
            return result
        costs = {
            Kind.FORWARD: table[0],
            Kind.BACKWARD: table[1] + table[2],
            Kind.INPUT_GRAD: table[1],
            Kind.WEIGHT_GRAD: table[2],
        }
        layout = self.layout
        v = layout.v or None
        return makespans(layout.schedule, layout.pp, self.m, v, costs, np.array(hops))


def _idle(idle: float, hops: float) -> Term:
    parts = (Term("bubble", idle - hops, worth=idle - hops), Term("hops", hops, worth=hops))
    return Term("pipeline axis", children=parts, worth=idle)
