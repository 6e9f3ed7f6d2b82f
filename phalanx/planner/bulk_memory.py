"""How many bytes the worst rank of each of many layouts needs: `cost/memory.py`, by column.

What depends on few columns is counted once for each of their values, by the same functions that
count a single layout; the rest is sums and maxima over arrays.

Symbols: h hidden, f ffn width, V vocabulary, t tp, e ep, p pp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.recompute import FULL, MODES
from phalanx.cost.blocks import HALF
from phalanx.cost.memory import held_in_backward, state_bytes
from phalanx.cost.params import block_held, embedding_held, head_held, table_held
from phalanx.cost.practice import Practice
from phalanx.cost.saved import (
    Saved,
    Stack,
    block_saved,
    bytes_per_token,
    head_saved,
    kept,
    mlp_saved,
)
from phalanx.cost.state import StateBytes
from phalanx.planner.bulk_moments import RankBytes, Whole, with_plain, worst_moment
from phalanx.planner.bulk_pipeline import Ranks, held_by, ranks_of
from phalanx.planner.bytes import head_waits
from phalanx.planner.candidates import Space
from phalanx.planner.columns import Booleans, Floats, Integers, Rows, Sharding, largest
from phalanx.schedules.layouts import placement

MANY = 3  # cp ranks; with more a ring holds no more


class Table:
    """A function of a few columns, found once for each combination of their values."""

    def __init__(self, price: Callable[..., float], *values: Sequence[int]) -> None:
        self._values = [np.array(column, dtype=np.int64) for column in values]
        grid = np.meshgrid(*self._values, indexing="ij")
        prices = [
            price(*(int(v) for v in at)) for at in zip(*(g.ravel() for g in grid), strict=True)
        ]
        self._table = np.array(prices, dtype=np.float64).reshape(grid[0].shape)

    def of(self, *columns: Integers) -> Floats:
        """The value of every row."""
        places = [
            np.searchsorted(values, column)
            for values, column in zip(self._values, columns, strict=True)
        ]
        result: Floats = self._table[tuple(places)]
        return result


@dataclass(frozen=True)
class Held:
    """Parameters of each unit on one rank of every row, before ZeRO cuts them."""

    dense: Floats  # a block without experts
    routed: Floats  # a block with experts: what all ranks share of it
    experts: Floats  # and its experts
    table: Floats
    embedding: Floats
    head: Floats


@dataclass(frozen=True)
class Kept:
    """Bytes of activations for each token of a micro-batch, of every row."""

    dense: Floats  # by a block without experts, until its backward
    routed: Floats
    dense_again: Floats  # what recomputation brings back while the backward of one block runs
    routed_again: Floats
    dense_gradients: Floats  # alive while one block is differentiated
    routed_gradients: Floats
    head: Floats  # by the head, until its backward, but for the logits
    logits: Floats  # that are put by with it
    loss: Floats  # in their place while the loss is computed


class Ledger:
    """Counts bytes of the rows of one space."""

    def __init__(self, where: Space, practice: Practice) -> None:
        self.where = where
        self.practice = practice
        self.stack = stack = practice.stack
        self.kinds: Ranks = ranks_of(where.shape, where.variants)
        self.chunks = np.array([v.v for v in where.variants], dtype=np.int64)
        self._splits = np.array([head_waits(v.layout) for v in where.variants])
        self._together = np.array([placement(v.layout).ends_together for v in where.variants])
        self.element = {"fp32": 4, "fp64": 8}.get(where.precision.rest, 2)
        self._held = _held_tables(where)
        self._kept = _kept_tables(where, stack, self.element)

    def held(self, rows: Rows) -> Held:
        """Parameters by unit; see `cost/params.py`."""
        tables, borrows = self._held, (rows.dp * rows.cp % rows.ep != 0).astype(np.int64)
        return Held(
            dense=tables["dense"].of(rows.tp),
            routed=tables["routed"].of(rows.tp),
            experts=tables["experts"].of(rows.tp, rows.ep, borrows),
            table=tables["table"].of(rows.tp),
            embedding=tables["embedding"].of(rows.tp),
            head=tables["head"].of(rows.tp, (~self._together[rows.variant]).astype(np.int64)),
        )

    def kept(self, rows: Rows) -> Kept:
        """Activations by unit; see `cost/saved.py`."""
        modes = {
            name: self._kept[name].of(rows.tp, rows.sp, rows.recompute)
            for name in ("dense", "routed", "dense_again", "routed_again")
        }
        cut = {
            name: self._kept[name].of(rows.tp, rows.sp, np.minimum(rows.cp, MANY))
            for name in ("dense_gradients", "routed_gradients")
        }
        cut["head"] = self._kept["head"].of(rows.tp, rows.sp)
        if self.practice.keeps_gates and self.where.shape.activation == "swiglu":
            full = rows.recompute == MODES.index(FULL)
            gates = np.where(full, 0.0, HALF * self.where.shape.ffn / rows.tp)
            modes |= {name: modes[name] + gates for name in ("dense", "routed")}
        peak = np.where(rows.tp > 1, self.stack.logit_peak, self.stack.logit_peak_whole)
        each = self.where.shape.vocab / rows.tp
        return Kept(**modes, **cut, logits=self.stack.logit_kept * each, loss=peak * each)

    def count(self, rows: Rows, held: Held) -> tuple[RankBytes, ...]:
        """Count what does not depend on the ZeRO stage, for every kind of pipeline rank."""
        keeps = self.kept(rows)
        kinds = self.kinds.kinds(rows.variant)
        return tuple(self._rank(rows, kind, held, keeps) for kind in range(kinds))

    def _rank(self, rows: Rows, kind: int, held: Held, keeps: Kept) -> RankBytes:
        dense, routed, last = self.kinds.of(rows.variant, kind)
        some, experts = dense > 0, routed > 0  # blocks of each sort, where it has any
        first, stages = kind == 0, self.kinds.stages[rows.variant]
        tokens = rows.mb * self.where.seq / rows.cp
        in_flight = held_by(rows, self.where.variants, self.kinds.place[rows.variant, kind])
        stage = tokens * (dense * keeps.dense + routed * keeps.routed) / stages
        boundary = tokens * self.where.shape.hidden * self.element
        messages = 2 * boundary / np.where(rows.sp > 0, rows.tp, 1) * (rows.pp > 1)
        put_by = np.maximum(in_flight - 1, 0.0) * (stages == 1)
        gradient = HALF * self.where.shape.vocab / rows.tp  # all that W of the head needs
        let_go = self._splits[rows.variant] * np.maximum(keeps.head + keeps.logits - gradient, 0.0)
        others = tokens * put_by * (keeps.head + keeps.logits)
        block = np.maximum(some * held.dense, experts * (held.routed + held.experts))
        table = np.maximum(first, last) * held.table
        ends = first * held.embedding + last * held.head
        left = (stages - first) * block + first * table
        found = RankBytes(
            shared=dense * held.dense + routed * held.routed + ends,
            experts=routed * held.experts,
            block=block,
            table=table,
            tied=table * (self._together[rows.variant] * self.where.shape.tied),
            left=left if self.stack.travels_on else 0.0 * left,
            blocks=np.ceil((dense + routed) / stages),
            alone=(stages == 1) * 1.0,
            first=first * np.ones(stages.shape),
            last=last.astype(np.float64),
            activations=in_flight * stage + messages,
            stage=stage,
            each=tokens * _least_of(some, keeps.dense, experts, keeps.routed),
            loss=others + tokens * (keeps.head + keeps.loss),
            put_by=others + tokens * keeps.head,
            gradient=tokens * self.where.shape.vocab * self.element / rows.tp,
            made=table * self.element if self.stack.adds_apart else 0.0 * table,
            boundary=boundary,
            let_go=tokens * last * put_by * let_go,
            again=tokens * np.maximum(some * keeps.dense_again, experts * keeps.routed_again),
            coming=tokens
            * np.maximum(some * keeps.dense_gradients, experts * keeps.routed_gradients),
            plain=stage,
        )
        return with_plain(found)

    def least(self, rows: Rows, ranks: Sequence[RankBytes]) -> Floats:
        """Bytes that no ZeRO stage goes below: all state over all ranks, and nothing gathered."""
        state = self._state(3)
        spread = Spread(self.where, rows, rows.dp)
        most = [
            (state.weights + state.gradients + state.optimizer) * spread.part(rank)
            + rank.activations
            + rank.plain
            for rank in ranks
        ]
        return self.with_reserve(largest(most))

    def worst(self, rows: Rows, ranks: Sequence[RankBytes], sharding: Sharding) -> Floats:
        """Bytes of the worst rank, of shape (rows, shards); see `memory.rank_memory`."""
        zero, state = sharding.zero, self._state(sharding.zero)
        spread = Spread(self.where, rows, sharding.shards)
        sizes = ((state.optimizer, 1), (state.gradients, 2), (state.weights, 3))
        whole = sum(size for size, least in sizes if zero < least)
        part = state.total - whole
        part += state.gradients if zero == 1 and self.stack.reduced_apart else 0.0
        units = self._whole(sharding)
        most = [
            part * spread.part(rank)
            + (whole * (rank.shared + rank.experts) + rank.activations)
            + worst_moment(rank, units)
            for rank in ranks
        ]
        return self.with_reserve(largest(most))

    def _whole(self, sharding: Sharding) -> Whole:
        weights = float(self.element) if sharding.zero == 3 else 0.0
        gradients = self.stack.gradient_bytes if sharding.zero >= 2 else 0.0
        return Whole(weights, gradients, gradients * (1 + 1 / sharding.shards))

    def with_reserve(self, allocated: Floats) -> Floats:
        """What the device must have for a program that allocates so much."""
        return self.stack.context + (1 + self.stack.fragmentation) * allocated

    def _state(self, zero: int) -> StateBytes:
        layout = Layout(dp=2, zero=zero, precision=self.where.precision)
        return state_bytes(layout, self.stack)


class Spread:
    """Over how many ranks ZeRO spreads shared parameters, and experts; see `params.copies`."""

    def __init__(self, where: Space, rows: Rows, shards: Integers) -> None:
        self._shared = (shards * rows.cp).astype(np.float64)
        self._experts: Floats | None = None
        if where.shape.is_moe:
            cut = np.where(rows.dp * rows.cp % rows.ep == 0, rows.tp, 1)
            each = rows.tp / (rows.ep * cut)
            self._experts = np.maximum(np.floor(self._shared * each), 1.0)

    def part(self, rank: RankBytes) -> Floats:
        """Parameters whose state stays on a rank."""
        shared: Floats = rank.shared / self._shared
        return shared if self._experts is None else shared + rank.experts / self._experts


def _least_of(some: Booleans, one: Floats, others: Booleans, other: Floats) -> Floats:
    """The least of two where both are, else that which is."""
    least = np.minimum(np.where(some, one, np.inf), np.where(others, other, np.inf))
    return np.where(some | others, least, 0.0)


def _held_tables(where: Space) -> dict[str, Table]:
    shape, tps = where.shape, where.values("tp")
    last = shape.layers - 1
    plain = replace(shape, experts=0)
    routed = shape.is_moe

    def experts(tp: int, ep: int, borrows: int) -> float:
        layout = Layout(tp=tp, ep=ep, dp=1 if borrows else ep)
        return block_held(shape, layout, last).experts if routed else 0.0

    return {
        "dense": Table(lambda tp: block_held(plain, Layout(tp=tp), 0).shared, tps),
        "routed": Table(
            lambda tp: block_held(shape, Layout(tp=tp), last).shared if routed else 0.0, tps
        ),
        "experts": Table(experts, tps, where.values("ep"), (0, 1)),
        "table": Table(lambda tp: table_held(shape, Layout(tp=tp)), tps),
        "embedding": Table(lambda tp: embedding_held(shape, Layout(tp=tp)).total, tps),
        "head": Table(
            lambda tp, apart: head_held(shape, Layout(tp=tp, pp=1 + apart)).total, tps, (0, 1)
        ),
    }


def _kept_tables(where: Space, stack: Stack, element: int) -> dict[str, Table]:
    shape, tps = where.shape, where.values("tp")
    layers = (0, shape.layers - 1)  # one without experts, if there is any, and the last one
    dense, routed = (block_saved(shape, layer, where.seq, element, stack) for layer in layers)
    of_head = [s for s in head_saved(shape, element, stack) if s.name != "logits"]

    def size(items: Sequence[Saved], tp: int, sp: int) -> float:
        return bytes_per_token(items, Layout(tp=tp, sp=bool(sp)))

    def left(saved: tuple[Saved, ...]) -> Table:
        modes = [kept(saved, name) for name in MODES]
        return Table(lambda tp, sp, mode: size(modes[mode], tp, sp), tps, (0, 1), range(3))

    def again(saved: tuple[Saved, ...]) -> Table:
        dropped = [[s for s in saved if s not in kept(saved, name)] for name in MODES]
        return Table(lambda tp, sp, mode: size(dropped[mode], tp, sp), tps, (0, 1), range(3))

    def gradients(saved: tuple[Saved, ...], *, experts: bool) -> Table:
        def price(tp: int, sp: int, cp: int) -> float:
            mlp = _gradients(shape, tp, sp, routed=experts) * element
            if cp == 1 or not stack.key_gradients_travel:
                return mlp
            attention = held_in_backward(shape, Layout(tp=tp, cp=cp), element)
            return max(mlp, attention - size(mlp_saved(saved), tp, sp))

        return Table(price, tps, (0, 1), (1, 2, MANY))

    return {
        "dense": left(dense),
        "routed": left(routed),
        "dense_again": again(dense),
        "routed_again": again(routed),
        "dense_gradients": gradients(dense, experts=False),
        "routed_gradients": gradients(routed, experts=True),
        "head": Table(lambda tp, sp: size(of_head, tp, sp), tps, (0, 1)),
    }


def _gradients(shape: ModelShape, t: int, sp: int, *, routed: bool) -> float:
    """Numbers per token that are alive while the MLP of a block is differentiated."""
    inputs = 3 if shape.activation == "swiglu" else 1
    if routed and shape.is_moe:
        width, h = shape.top_k * (shape.moe_ffn or shape.ffn), shape.top_k * shape.hidden
        return (inputs * width + 2 * h) / (t if sp else 1) + 2 * shape.hidden
    return inputs * shape.ffn / t + 2 * shape.hidden
