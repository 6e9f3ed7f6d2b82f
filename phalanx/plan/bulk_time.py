"""How long the step of each of many layouts takes: `plan/estimate.py`, by column.

One micro-batch through a block costs the same in many layouts, so each different one is priced
once, by the same function that prices a single layout. Pipelines are priced by closed formulas.
`search` then lets `estimate` decide among the best.

Symbols: T tokens of a micro-batch on one rank, p pipeline ranks, v chunks per rank.
"""

from dataclasses import dataclass, fields, replace
from math import log2

import numpy as np

from phalanx.cost.blocks import HALF
from phalanx.plan.bulk_memory import Held, Ledger, RankBytes, spread_over
from phalanx.plan.bulk_pipeline import Pipes, Seconds, makespans
from phalanx.plan.bulk_wires import Collectives, Fabric, Groups, fabric_of, send
from phalanx.plan.candidates import (
    SEARCHED,
    Floats,
    Integers,
    Rows,
    Sharding,
    Space,
    different,
    largest,
)
from phalanx.plan.question import Question
from phalanx.plan.stages import UnitCost, block_cost, embedding_cost, head_cost


@dataclass(frozen=True)
class Units:
    """One micro-batch through each unit, of every row, without what ZeRO gathers and reduces."""

    dense: Seconds
    routed: Seconds
    embedding: Seconds
    head: Seconds

    def take(self, which: Integers) -> "Units":
        """Some of the rows."""
        return Units(*(getattr(self, field.name).take(which) for field in fields(self)))


class UnitPrices:
    """Prices of units, each found once for all rows that share it.

    A block depends on the tokens that a rank sees, on tp, sp, recompute and ep; and on cp only
    by the ring of keys and values, which is added by column.
    """

    def __init__(self, where: Space, question: Question) -> None:
        self._where = where
        self._question = question
        self._fabric = fabric_of(question.cluster, question.rates)
        self._blocks: dict[tuple[int, ...], tuple[float, ...]] = {}
        self._ends: dict[tuple[int, ...], tuple[float, ...]] = {}

    def price(self, rows: Rows) -> Units:
        """One micro-batch through each unit of every row, of shape (rows, 1)."""
        columns = self._columns(rows)
        first, inverse = different(columns, least=rows.cp)
        keys = zip(*(column[first].tolist() for column in columns), strict=True)
        table = [
            self._block(key, rows, place) + self._end(key[:3], rows, place)
            for key, place in zip(keys, first.tolist(), strict=True)
        ]
        each = np.array(table).reshape(-1, 14)[inverse].T[:, :, None]
        dense, routed, embedding, head = (Seconds(*each[i : i + 3]) for i in (0, 3, 8, 11))
        ring = ring_seconds(self._where, rows.tall, self._question, (each[6], each[7]))
        return Units(dense.plus(ring), routed.plus(ring), embedding, head)

    def _columns(self, rows: Rows) -> tuple[Integers, ...]:
        """What a unit depends on; of the place of experts, how many share a domain."""
        tokens = rows.mb * (self._where.seq // rows.cp)
        borrows = rows.dp * rows.cp % rows.ep != 0
        together = (rows.pp == 1) | (rows.ep <= rows.cp) | self._question.practice.pipeline_outside
        stride = np.where(together, rows.tp, rows.tp * rows.cp * rows.pp)
        near = Groups(rows.ep, np.where(borrows, 1, stride)).inside(self._fabric)
        borrowed = borrows.astype(np.int64)
        return (tokens, rows.tp, rows.sp, rows.recompute, rows.ep, borrowed, near)

    def _block(self, key: tuple[int, ...], rows: Rows, place: int) -> tuple[float, ...]:
        """Passes of a block without experts, and with them; F and I of attention."""
        if key not in self._blocks:
            question = replace(self._question, layout=self._where.layout(rows, place))
            dense = block_cost(question, routed=False)
            routed = block_cost(question, routed=True) if self._where.shape.is_moe else None
            attention = dense.terms["attention"]
            passes = (*_passes(dense), *_passes(routed), attention.F, attention.I)
            self._blocks[key] = passes
        return self._blocks[key]

    def _end(self, key: tuple[int, ...], rows: Rows, place: int) -> tuple[float, ...]:
        """Passes of the embedding and of the head."""
        if key not in self._ends:
            layout = self._where.layout(rows, place)
            plain = replace(layout, recompute="none", ep=1)
            question = replace(self._question, layout=plain)
            units = embedding_cost(question), head_cost(question)
            self._ends[key] = (*_passes(units[0]), *_passes(units[1]))
        return self._ends[key]


def _passes(unit: UnitCost | None) -> tuple[float, float, float]:
    """Without the ring of keys and values."""
    if unit is None:
        return 0.0, 0.0, 0.0
    every, ring = unit.seconds, unit.terms.get("context")
    if ring is None:
        return every.F, every.I, every.W
    return every.F - ring.F, every.I - ring.I, every.W - ring.W


def ring_seconds(
    where: Space, rows: Rows, question: Question, attention: tuple[Floats, Floats]
) -> Seconds:
    """What attention does not hide of the ring of keys and values; see `stages`."""
    shape, fabric = where.shape, fabric_of(question.cluster, question.rates)
    heads = np.maximum(shape.kv_heads / rows.tp, 1)
    size = HALF * 2 * heads * shape.head_dim * rows.mb * where.seq / rows.cp
    each = send(size, Groups(rows.cp, rows.tp), fabric)
    shown = [
        np.maximum(each - a / rows.cp / k, 0.0) for a, k in zip(attention, (1, 2), strict=True)
    ]
    steps = rows.cp - 1
    return Seconds(steps * shown[0], 2 * steps * shown[1], np.zeros(rows.tp.shape))


@dataclass(frozen=True)
class Steps:
    """Rows, and what is known of them; columns are of shape (rows, 1).

    Attributes:
        question: one question of the space, for all that does not depend on the layout.
        ledger: of the space.
        rows: the rows.
        units: one micro-batch through each unit.
        held: parameters of each unit.
        ranks: parameters of each kind of pipeline rank.
    """

    question: Question
    ledger: Ledger
    rows: Rows
    units: Units
    held: Held
    ranks: tuple[RankBytes, ...]

    def take(self, which: Integers) -> "Steps":
        """Some of the rows."""
        held = Held(*(getattr(self.held, part.name)[which] for part in fields(self.held)))
        ranks = tuple(rank.take(which) for rank in self.ranks)
        some = self.rows.take(which), self.units.take(which), held, ranks
        return Steps(self.question, self.ledger, *some)

    @property
    def chunks(self) -> Integers:
        """v, the stages of a rank."""
        return self.ledger.chunks[self.rows.variant]

    @property
    def fabric(self) -> Fabric:
        """The links of the cluster."""
        return fabric_of(self.question.cluster, self.question.rates)

    def data_groups(self, sharding: Sharding) -> Groups:
        """The ranks that share one copy of the weights, or hold the same; see `data_links`."""
        rows = self.rows
        apart = 1 if self.question.practice.pipeline_outside else rows.pp
        stride = rows.tp * np.where(rows.cp > 1, 1, apart)
        size = sharding.shards * rows.cp
        return Groups(size, np.broadcast_to(stride, size.shape))


def step_seconds(steps: Steps, sharding: Sharding) -> Floats:
    """Seconds of one optimizer step, of shape (rows, shards)."""
    question = steps.question
    groups = steps.data_groups(sharding)
    halves = Collectives("reduce_scatter", groups, steps.fabric)
    units = steps.units if sharding.zero < 2 else with_weights(steps, sharding, halves)
    body = pipeline_seconds(steps, units) + optimizer_seconds(steps, sharding)
    body = body + data_seconds(steps, units, sharding, halves)
    domains = question.cluster.domains(question.cluster.count)
    return body * (1 + question.rates.jitter * log2(domains))


def with_weights(steps: Steps, sharding: Sharding, halves: Collectives) -> Units:
    """Add what ZeRO-2 and 3 gather and reduce around every unit and cannot hide."""
    units, held = steps.units, steps.held

    def add(unit: Seconds, params: Floats) -> Seconds:
        """Weights before each use, gradients after the backward; see `stages`."""
        gather = halves.seconds(params * HALF) if sharding.zero == 3 else np.zeros(1)
        reduce = halves.seconds(params * steps.question.practice.gradient)
        forward = exposed(steps, gather, unit.F)
        backward = exposed(steps, gather + reduce, unit.I + unit.W)
        return Seconds(unit.F + forward, unit.I + backward, unit.W)

    routed = held.routed + held.experts
    return Units(
        dense=add(units.dense, held.dense),
        routed=add(units.routed, routed) if routed.any() else units.routed,
        embedding=add(units.embedding, held.embedding),
        head=add(units.head, held.head),
    )


def exposed(steps: Steps, message: Floats, behind: Floats) -> Floats:
    """Seconds of messages that show behind so much arithmetic; see `stages.exposed_share`."""
    return message - np.minimum(message, behind) * (1 - steps.question.rates.interference)


def pipeline_seconds(steps: Steps, units: Units) -> Floats:
    """Seconds from the first forward to the last backward."""
    rows, where, chunks = steps.rows, steps.ledger.where, steps.chunks
    codes = np.array([SEARCHED.index(v.schedule) for v in where.variants])
    routed = np.array(where.shape.moe_layers)
    blocks = units.dense.times(where.shape.layers - routed).plus(units.routed.times(routed))
    every = blocks.plus(units.embedding).plus(units.head)
    pipes = Pipes(
        p=rows.pp.astype(np.float64),
        m=rows.m.astype(np.float64),
        v=chunks.astype(np.float64),
        passes=every.times(1 / (rows.pp * chunks)),
        worst=_worst_rank(steps, units),
        total=every.total,
        hop=hop_seconds(steps),
    )
    return makespans(pipes, codes[rows.variant[:, 0]], SEARCHED)


def _worst_rank(steps: Steps, units: Units) -> Floats:
    """Seconds of one micro-batch on the busiest rank."""
    kinds, rows = steps.ledger.kinds, steps.rows
    blocks, routed, head = units.dense.total, units.routed.total, units.head.total
    seconds = []
    for kind in range(kinds.kinds):
        dense, experts, place = kinds.of(rows.variant, kind)
        here = dense * blocks + (place == rows.pp - 1) * head
        if routed.any():
            here = here + experts * routed
        seconds.append(here + units.embedding.total if kind == 0 else here)
    return largest(seconds)


def hop_seconds(steps: Steps) -> Floats:
    """Seconds to carry one tensor to the next pipeline rank."""
    rows, where = steps.rows, steps.ledger.where
    outside = rows.dp if steps.question.practice.pipeline_outside else 1
    size = HALF * rows.mb * where.seq / rows.cp * where.shape.hidden / rows.tp
    return send(size, Groups(rows.pp, rows.tp * rows.cp * outside), steps.fabric)


def data_seconds(steps: Steps, units: Units, sharding: Sharding, halves: Collectives) -> Floats:
    """What the data axis adds to the pipeline; see `estimate`."""
    practice, zero = steps.question.practice, sharding.zero
    one, count = first_stage(steps, units)
    params = steps.ranks[0].shared + steps.ranks[0].experts
    if zero == 0:
        halves = Collectives("all_reduce", steps.data_groups(sharding), steps.fabric)
    reduce = halves.seconds(params * practice.gradient)
    gather = halves.seconds(params * HALF) if zero in (1, 3) else np.zeros(1)
    if zero >= 2:
        return (reduce + gather) / count
    shown = _shown(steps, reduce, (one.I + one.W, count), hides=practice.hides_gradients)
    return shown + _shown(steps, gather, (one.F, count), hides=practice.hides_weights)


def first_stage(steps: Steps, units: Units) -> tuple[Seconds, Floats]:
    """One micro-batch through v first stages of every row, and how many units they have."""
    kinds, rows = steps.ledger.kinds, steps.rows
    dense, routed = kinds.first_dense[rows.variant], kinds.first_routed[rows.variant]
    alone = (rows.pp == 1).astype(np.int64)
    blocks = units.dense.times(dense).plus(units.routed.times(routed))
    total = blocks.plus(units.embedding).plus(units.head.times(alone))
    return total.times(steps.chunks), (1.0 + dense + routed + alone) * steps.chunks


def _shown(steps: Steps, message: Floats, behind: tuple[Floats, Floats], *, hides: bool) -> Floats:
    """Seconds of a message that show behind (seconds, units): those of one unit, at the least."""
    if not hides:
        return message
    seconds, units = behind
    return np.maximum(exposed(steps, message, seconds * (1 - 1 / units)), message / units)


def optimizer_seconds(steps: Steps, sharding: Sharding) -> Floats:
    """AdamW over the state that stays on the rank that has most of it."""
    shared_by, experts_by = spread_over(steps.rows, sharding.shards)
    if sharding.zero == 0:
        shared_by, experts_by = np.ones(1), np.ones(1)
    kept = [rank.shared / shared_by + rank.experts / experts_by for rank in steps.ranks]
    each = steps.question.machine.sweep_seconds(steps.question.practice.optimizer_bytes)
    seconds: Floats = largest(kept) * each
    return seconds
