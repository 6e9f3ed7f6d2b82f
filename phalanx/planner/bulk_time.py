"""How long the step of each of many layouts takes: `planner/estimate.py`, by column.

Pipelines are priced by closed formulas (`planner/bulk_pipeline.py`), units from tables
(`planner/bulk_units.py`). `planner/finals.py` then lets `estimate` decide among the best.

Symbols: p pipeline ranks, v chunks per rank.
"""

from dataclasses import dataclass, fields

import numpy as np

from phalanx.cost.blocks import HALF
from phalanx.planner.bulk_memory import Held, Ledger, Spread
from phalanx.planner.bulk_moments import RankBytes
from phalanx.planner.bulk_pipeline import makespans
from phalanx.planner.bulk_units import Units, exposed
from phalanx.planner.bulk_wires import Collectives, Fabric, Groups, fabric_of, groups_of, send
from phalanx.planner.columns import Floats, Integers, Rows, Sharding, largest
from phalanx.planner.question import Question
from phalanx.schedules.formulas import Pipes, Seconds


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
        return groups_of(sharding.shards * rows.cp, stride)


def least_seconds(steps: Steps) -> Floats:
    """Seconds of the pipeline alone, which no ZeRO stage makes faster, of shape (rows,)."""
    seconds: Floats = pipeline_seconds(steps, steps.units)[:, 0]
    return seconds


def step_seconds(steps: Steps, sharding: Sharding) -> Floats:
    """Seconds of one optimizer step, of shape (rows, shards)."""
    question = steps.question
    groups = steps.data_groups(sharding)
    halves = Collectives("reduce_scatter", groups, steps.fabric)
    units = steps.units if sharding.zero < 2 else with_weights(steps, sharding, halves)
    body = pipeline_seconds(steps, units) + optimizer_seconds(steps, sharding)
    body = body + data_seconds(steps, units, sharding, halves)
    replicas = steps.rows.dp * steps.rows.cp
    apart = np.minimum(question.cluster.domains(question.cluster.count), replicas)
    lasts: Floats = body * (1 + question.rates.jitter * np.log2(apart))
    return lasts


def with_weights(steps: Steps, sharding: Sharding, halves: Collectives) -> Units:
    """Add what ZeRO-2 and 3 gather and reduce around every unit and cannot hide."""
    units, held = steps.units, steps.held

    def add(unit: Seconds, params: Floats, *, again: bool) -> Seconds:
        """Weights before each use, gradients after the backward; see `stages`."""
        gather = halves.seconds(params * HALF) if sharding.zero == 3 else np.zeros(1)
        reduce = halves.seconds(params * steps.question.practice.gradient)
        forward = exposed(steps.question, gather, unit.F)
        late = gather + reduce if again else reduce
        backward = exposed(steps.question, late, unit.I + unit.W)
        return Seconds(unit.F + forward, unit.I + backward, unit.W)

    routed = held.routed + held.experts
    return Units(
        dense=add(units.dense, held.dense, again=True),
        routed=add(units.routed, routed, again=True) if routed.any() else units.routed,
        embedding=add(units.embedding, held.embedding, again=False),
        head=add(units.head, held.head, again=True),
    )


def pipeline_seconds(steps: Steps, units: Units) -> Floats:
    """Seconds from the first forward to the last backward."""
    rows, where, chunks = steps.rows, steps.ledger.where, steps.chunks
    routed = np.array(where.shape.moe_layers)
    blocks = blocks_seconds(units, where.shape.layers - routed, routed)
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
    return makespans(pipes, where.variants, rows.variant[:, 0])


def blocks_seconds(units: Units, dense: Integers, routed: Integers) -> Seconds:
    """So many blocks without, and with experts."""
    plain = units.dense.times(dense)
    return plain.plus(units.routed.times(routed)) if routed.any() else plain


def _worst_rank(steps: Steps, units: Units) -> Floats:
    """Seconds of one micro-batch on the busiest rank; copies of the model share them."""
    kinds, variant = steps.ledger.kinds, steps.rows.variant
    blocks, routed, head = units.dense.total, units.routed.total, units.head.total
    seconds = []
    for kind in range(2 if not kinds.routed.any() else kinds.kinds(variant)):
        dense, experts, last = kinds.of(variant, kind)
        here = dense * blocks + last * head
        if kinds.routed.any():
            here = here + experts * routed
        seconds.append(here + units.embedding.total if kind == 0 else here)
    if not kinds.routed.any():
        seconds.append(kinds.dense.max(axis=1)[variant] * blocks)
    return largest(seconds) / kinds.copies[variant]


def hop_seconds(steps: Steps) -> Floats:
    """Seconds to carry one tensor to the next pipeline rank."""
    rows, where = steps.rows, steps.ledger.where
    outside = rows.dp if steps.question.practice.pipeline_outside else 1
    size = HALF * rows.mb * where.seq / rows.cp * where.shape.hidden / rows.tp
    return send(size, groups_of(rows.pp, rows.tp * rows.cp * outside), steps.fabric)


def data_seconds(steps: Steps, units: Units, sharding: Sharding, halves: Collectives) -> Floats:
    """What the data axis adds to the pipeline; see `planner/exchange.py`."""
    practice, zero = steps.question.practice, sharding.zero
    one, count = first_stage(steps, units)
    params = steps.ranks[0].shared + steps.ranks[0].experts
    within = halves
    if zero == 0:
        within = Collectives("all_reduce", steps.data_groups(sharding), steps.fabric)
    reduce = within.seconds(params * practice.gradient)
    gather = halves.seconds(params * HALF) if zero else np.zeros(1)
    behind = one.I + one.W
    if zero >= 2:
        shown = reduce / count
    else:
        shown = _shown(steps, reduce, (behind, count), hides=practice.hides_gradients)
    if zero == 3:
        shown = shown + gather / count
    else:
        shown = shown + _shown(steps, gather, (one.F, count), hides=practice.hides_weights)
    if zero == 0 or not (sharding.shards < steps.rows.dp).any():
        return shown
    left = np.maximum(behind - reduce, 0.0)
    copies = copies_seconds(steps, sharding)
    return shown + _shown(steps, copies, (left, count), hides=practice.hides_gradients)


def copies_seconds(steps: Steps, sharding: Sharding) -> Floats:
    """Seconds in which the parts of all sharded copies are summed; 0 where there is one copy."""
    rows, shards, rank = steps.rows, sharding.shards, steps.ranks[0]
    part = Spread(steps.ledger.where, rows, shards).part(rank)
    outside = 1 if steps.question.practice.pipeline_outside else rows.pp
    replicas = rows.dp // shards
    stride = rows.tp * rows.cp * outside * shards
    wires = Collectives("all_reduce", groups_of(replicas, stride), steps.fabric)
    return wires.seconds(part * steps.question.practice.gradient)


def first_stage(steps: Steps, units: Units) -> tuple[Seconds, Floats]:
    """One micro-batch through v first stages of every row, and how many units they have."""
    kinds, rows = steps.ledger.kinds, steps.rows
    dense, routed = kinds.first_dense[rows.variant], kinds.first_routed[rows.variant]
    alone = (rows.pp == 1).astype(np.int64)
    blocks = blocks_seconds(units, dense, routed)
    total = blocks.plus(units.embedding).plus(units.head.times(alone))
    return total.times(steps.chunks), (1.0 + dense + routed + alone) * steps.chunks


def _shown(steps: Steps, message: Floats, behind: tuple[Floats, Floats], *, hides: bool) -> Floats:
    """Seconds of a message that show behind (seconds, units): those of one unit, at the least."""
    if not hides:
        return message
    seconds, units = behind
    return np.maximum(exposed(steps.question, message, seconds * (1 - 1 / units)), message / units)


def optimizer_seconds(steps: Steps, sharding: Sharding) -> Floats:
    """AdamW over the state that stays on the rank that has most of it."""
    each = steps.question.machine.sweep_seconds(steps.question.practice.optimizer_bytes)
    if sharding.zero == 0:
        return largest(rank.shared + rank.experts for rank in steps.ranks) * each
    spread = Spread(steps.ledger.where, steps.rows, sharding.shards)
    return largest(spread.part(rank) for rank in steps.ranks) * each
