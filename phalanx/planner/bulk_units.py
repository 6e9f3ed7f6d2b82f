"""What one micro-batch through a block, embedding or head costs: `planner/stages.py`, by column.

All kernels of a unit grow with the tokens of a micro-batch, so they are listed once for each way to
cut the model, and priced for all numbers of tokens at once.

Symbols: e ep, r ranks of an expert group that share a domain.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.recompute import FULL, MODES, Recompute
from phalanx.cost.blocks import HALF, Slice, block_work, embedding_work, head_work
from phalanx.cost.compute import Product, Work
from phalanx.cost.params import block_held, embedding_held, head_held
from phalanx.cost.roofline import expected_ranks
from phalanx.planner.bulk_compute import Kernels, Load, Messages
from phalanx.planner.bulk_wires import Collectives, Fabric, Groups, fabric_of, groups_of, send
from phalanx.planner.candidates import Space
from phalanx.planner.columns import Booleans, Floats, Integers, Rows
from phalanx.planner.question import Question
from phalanx.planner.stages import Around, around_block
from phalanx.schedules.formulas import Seconds


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


class UnitTables:
    """Prices of all units that occur in a space, by tokens, tp, sp, recompute and ep.

    Args:
        where: the space.
        question: for the devices and the habits of the program.
        tokens: of a micro-batch on one rank, all that occur.

    Raises:
        UsageError: attention is not fused; then a block does not depend on its tokens alone.
    """

    def __init__(self, where: Space, question: Question, tokens: Integers) -> None:
        if not question.practice.fused_attention:
            raise UsageError(
                f"{question.practice.name} keeps attention scores in memory, which the search "
                "cannot price; phalanx estimate prices one layout of it"
            )
        self._where, self._question = where, question
        self._fabric = fabric_of(question.cluster, question.rates)
        self._tokens = np.unique(tokens)
        self._tps, self._eps = where.values("tp"), where.values("ep")
        cuts = [Layout(tp=tp, sp=sp) for tp in self._tps for sp in (False, True)]
        two, all_cuts = (False, True), (len(self._tps), 2)
        self._dense = _shaped([self._block(cut, routed=False) for cut in cuts], all_cuts)
        self._embedding = _shaped([self._end(cut, first=True) for cut in cuts], all_cuts)
        heads = [
            self._end(replace(cut, pp=1 + apart), first=False) for cut in cuts for apart in two
        ]
        self._head = _shaped(heads, (*all_cuts, 2))
        if where.shape.is_moe:
            spread = [
                replace(cut, ep=ep, dp=1 if borrows else ep)
                for cut in cuts
                for ep in self._eps
                for borrows in two
            ]
            routed = [self._block(layout, routed=True) for layout in spread]
            self._routed = _shaped(routed, (*all_cuts, len(self._eps), 2))

    def price(self, rows: Rows) -> Units:
        """One micro-batch through each unit of every row, of shape (rows, 1)."""
        shape, practice = self._where.shape, self._question.practice
        launch = 0.0 if practice.graphs else self._question.rates.launch
        tp, sp, mode = np.searchsorted(self._tps, rows.tp), rows.sp, rows.recompute
        tokens = np.searchsorted(self._tokens, rows.mb * (self._where.seq // rows.cp))
        ring = ring_messages(self._where, self._fabric, rows, _load(self._dense[tp, sp, 0, tokens]))
        dense = _load(self._dense[tp, sp, mode, tokens]).sending(ring).launched(launch)
        routed = Seconds(*np.zeros((3, len(rows), 1)))
        if shape.is_moe:
            ep, borrows = np.searchsorted(self._eps, rows.ep), borrowing(rows).astype(np.int64)
            load = _load(self._routed[tp, sp, ep, borrows, mode, tokens]).sending(ring)
            routed = load.sending(self._expert_messages(rows)).launched(launch)
        apart = (rows.pp > 1).astype(np.int64)
        embedding = _load(self._embedding[tp, sp, 0, tokens]).launched(launch)
        head = _load(self._head[tp, sp, apart, 0, tokens]).launched(launch)
        return Units(dense, routed, embedding, head)

    def _block(self, layout: Layout, *, routed: bool) -> list[Load]:
        """A block, for each mode of recomputation."""
        shape = self._where.shape
        works = block_work(self._slice(layout), routed=routed)
        held = block_held(shape, layout, shape.layers - 1 if routed else 0)
        return self._loads(layout, works, held.total, around_block(shape))

    def _end(self, layout: Layout, *, first: bool) -> list[Load]:
        """The embedding or the head, which are never recomputed."""
        if first:
            works, held = embedding_work(self._slice(layout)), embedding_held
            around = Around((), rows=1)
        else:
            works, held = head_work(self._slice(layout)), head_held
            around = Around((self._where.shape.hidden,), rows=0)
        params = held(self._where.shape, layout).total
        return self._loads(layout, works, params, around)[:1]

    def _slice(self, layout: Layout) -> Slice:
        return Slice(self._where.shape, layout, self._where.seq, self._question.practice)

    def _loads(
        self, layout: Layout, works: Sequence[Work], params: float, around: Around
    ) -> list[Load]:
        """A unit for each mode of recomputation, with the messages of its tensor axis."""
        question, practice = self._question, self._question.practice
        alone = 0.0 if practice.fused_accumulation else practice.accumulate
        accumulation = question.machine.sweep_seconds(alone * params)
        kernels = Kernels(question, works, self._tokens / self._where.seq)
        loads = []
        for mode in MODES:
            load = kernels.load(mode, accumulation)
            for messages in self._tensor_messages(layout, around, kernels.sum(Product), mode):
                load = load.sending(messages)
            loads.append(load)
        return loads

    def _tensor_messages(
        self, layout: Layout, around: Around, products: Seconds, mode: Recompute
    ) -> Iterator[Messages]:
        """Messages around products; see `stages`."""
        if layout.tp == 1:
            return
        h, rows, gathered = self._where.shape.hidden, around.rows, around.gathered
        groups = Groups(np.array([float(layout.tp)]), np.ones(1))
        repeats = int(mode.segment > 0 and rows > 0 and len(gathered) > 0)
        share = 1 / (2 * (len(around.columns) + rows))
        add_up = "reduce_scatter" if layout.sequence_parallel else "all_reduce"

        def each(collective: str, width: int) -> Floats:
            size = HALF * self._tokens * width * np.ones(1)
            return Collectives(collective, groups, self._fabric).seconds(size)

        yield Messages((rows, repeats * (rows - 1)), (each(add_up, h), each(add_up, h)))
        for width, count in gathered.items():
            one = each(add_up, width)
            yield Messages((0, count), (one, self._beside(one, share * products.W)))
        if not layout.sequence_parallel:
            return
        for width in dict.fromkeys((h, *gathered)):
            one = each("all_gather", width)
            times = (gathered[width], repeats * gathered[width] + rows * (width == h))
            yield Messages(times, (one, one))
        for width, count in Counter(around.columns).items():
            one = each("all_gather", width)
            yield Messages((0, count), (one, self._beside(one, share * products.I)))

    def _beside(self, message: Floats, product: Floats) -> Floats:
        """What a product does not hide of a message in backward."""
        if not self._question.practice.hides_sums:
            return message
        return exposed(self._question, message, product)

    def _expert_messages(self, rows: Rows) -> Messages:
        """Tokens to their experts and back; see `stages`."""
        shape, fabric, practice = self._where.shape, self._fabric, self._question.practice
        together = (rows.pp == 1) | (rows.ep <= rows.cp) | practice.pipeline_outside
        stride = np.where(together, rows.tp, rows.tp * rows.cp * rows.pp)
        groups = groups_of(rows.ep, np.where(borrowing(rows), 1, stride))
        e, r = rows.ep, groups.inside(fabric).astype(np.int64)
        reached = np.array([expected_ranks(n, shape.top_k) for n in range(1, max(self._eps) + 1)])
        own = rows.mb * self._where.seq / rows.cp / np.where(rows.sp > 0, rows.tp, 1)
        tokens = HALF * own * shape.hidden
        near = tokens * reached[e - 1] * (r - 1) / e / groups.near(fabric)
        far = tokens * reached[e // r - 1] * (1 - r / e) / fabric.far
        latency = np.where(r < e, fabric.far_latency, fabric.near_latency)
        each = (np.maximum(near, far) + latency)[:, None]
        times: Floats = np.where(e > 1, 2.0, 0.0)[:, None]
        again: Floats = np.where(rows.recompute == MODES.index(FULL), 2.0, 1.0)[:, None]
        return Messages((times, times * again), (each, each))


def _shaped(units: Sequence[list[Load]], shape: tuple[int, ...]) -> Floats:
    """Loads as one table: cuts, modes, tokens, and what a load consists of."""
    table = np.array(units)  # cuts x modes x parts x tokens
    return np.moveaxis(table.reshape(*shape, *table.shape[1:]), -2, -1)


def _load(table: Floats) -> Load:
    """Rows of a table, of shape (rows, 1)."""
    return Load(*(part[:, None] for part in table.T))


def borrowing(rows: Rows) -> Booleans:
    """Where experts take their ranks from tp, too; see `params.expert_tp`."""
    result: Booleans = rows.dp * rows.cp % rows.ep != 0
    return result


def exposed(question: Question, message: Floats, behind: Floats) -> Floats:
    """Seconds of messages that show behind so much arithmetic; see `stages.exposed_share`."""
    return message - np.minimum(message, behind) * (1 - question.rates.interference)


def ring_messages(where: Space, fabric: Fabric, rows: Rows, block: Load) -> Messages:
    """Keys and values around the ring of cp ranks, behind attention; see `stages`."""
    shape, rows = where.shape, rows.tall
    heads = np.maximum(shape.kv_heads / rows.tp, 1)
    size = HALF * heads * shape.kv_width * rows.mb * where.seq / rows.cp
    each = send(size, groups_of(rows.cp, rows.tp), fabric)
    forward = np.maximum(each - block.attention_forward / rows.cp, 0.0)
    backward = np.maximum(each - block.attention_backward / rows.cp / 2, 0.0)
    steps = (rows.cp - 1).astype(np.float64)
    return Messages((steps, 2 * steps), (forward, backward))
