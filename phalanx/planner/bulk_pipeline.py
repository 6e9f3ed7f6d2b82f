"""How long pipelines of many layouts take, and what their ranks hold, by closed formulas.

The formulas are the longest chains of actions that wait for each other, read off played schedules.
They are exact where all stages cost the same and nothing has to be carried; `planner/pace.py` plays
the schedules themselves, and decides among the best layouts.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank; F, I, W seconds of one stage.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.params import stages_of_rank
from phalanx.planner.candidates import Variant
from phalanx.planner.columns import Floats, Integers, Rows, largest

SHOWN = 0.35  # of the bubble of a folded pipeline shows, however uneven its ranks: by trials


@dataclass(frozen=True)
class Seconds:
    """Three passes of one micro-batch, of every row."""

    F: Floats
    I: Floats  # noqa: E741  # the letter of the legend
    W: Floats

    def plus(self, other: "Seconds") -> "Seconds":
        """Both, one after the other."""
        return Seconds(self.F + other.F, self.I + other.I, self.W + other.W)

    def times(self, count: Integers | Floats) -> "Seconds":
        """All of it so many times."""
        return Seconds(self.F * count, self.I * count, self.W * count)

    def take(self, which: Integers | slice) -> "Seconds":
        """Some of the rows."""
        return Seconds(self.F[which], self.I[which], self.W[which])

    @property
    def each(self) -> tuple[Floats, Floats, Floats]:
        """F, I and W."""
        return self.F, self.I, self.W

    @property
    def total(self) -> Floats:
        """All three."""
        result: Floats = self.F + self.I + self.W
        return result


@dataclass(frozen=True)
class Pipes:
    """Pipelines by column.

    Attributes:
        p, m, v: sizes; v counts the stages of a rank.
        passes: seconds of one micro-batch on one stage, on average over the stages.
        worst: seconds of one micro-batch on the busiest rank, all its stages together.
        total: seconds of one micro-batch on all stages together.
        hop: seconds to carry one tensor to another rank.
    """

    p: Floats
    m: Floats
    v: Floats
    passes: Seconds
    worst: Floats
    total: Floats
    hop: Floats

    def take(self, which: slice) -> "Pipes":
        """Some of them."""
        p, m, v, worst, total, hop = (
            column[which] for column in (self.p, self.m, self.v, self.worst, self.total, self.hop)
        )
        return Pipes(p, m, v, self.passes.take(which), worst, total, hop)

    @property
    def filled(self) -> Floats:
        """(m - 1) / (p - 1): how far the micro-batches fill the ranks once, or more than once."""
        return (self.m - 1) / np.maximum(self.p - 1, 1)


def makespans(pipes: Pipes, variants: Sequence[Variant], variant: Integers) -> Floats:
    """Seconds from the first forward to the last backward of every row.

    Args:
        pipes: the rows, of shape (rows, 1) or (rows, shards).
        variants: schedules with their sizes.
        variant: that of every row, of shape (rows,); equal schedules stand together.
    """
    result = np.empty(pipes.worst.shape)
    for name, rows in runs(variants, variant):
        result[rows] = FORMULAS[name](pipes.take(rows))
    return result


def runs(variants: Sequence[Variant], variant: Integers) -> Iterator[tuple[str, slice]]:
    """Each schedule, and the rows that have it."""
    names = list(FORMULAS)
    codes = np.array([names.index(v.schedule) for v in variants])[variant]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    for start, stop in zip(starts, (*starts[1:], len(codes)), strict=True):
        yield names[codes[start]], slice(int(start), int(stop))


def _one_f_one_b(x: Pipes) -> Floats:
    """One micro-batch through all, and a period for each of the others.

    A rank that holds p micro-batches cannot start the next before the first has come back.
    """
    around = x.total + 2 * (x.p - 1) * x.hop
    period = np.where(x.m > x.p, np.maximum(x.worst, around / x.p), x.worst)
    return around + (x.m - 1) * period


def _gpipe(x: Pipes) -> Floats:
    return x.total + 2 * (x.p - 1) * x.hop + (x.m - 1) * x.worst


def _interleaved(x: Pipes) -> Floats:
    """The other ranks wait for one chunk, not for one rank's whole share."""
    return x.m * x.worst + (x.p - 1) * (x.total / (x.p * x.v) + 2 * x.hop)


def _with_bubble(x: Pipes, bubble: Floats) -> Floats:
    return (x.m - 1) * x.worst + x.total / x.p + bubble + 2 * (x.p - 1) * x.hop


def _folded(x: Pipes, bubble: Floats) -> Floats:
    """The first rank of a folded pipeline works longest, while the others stand idle."""
    average = x.total / x.p
    left = np.maximum(bubble - x.m * (x.worst - average), SHOWN * bubble)
    return x.m * x.worst + left + 2 * (x.p - 1) * x.hop


def _zb_h1(x: Pipes) -> Floats:
    """(p - 1) max(F + I - W, F, I), W as far as there are micro-batches to fill it."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    full = np.minimum(x.filled, 1.0)
    return _with_bubble(x, (x.p - 1) * largest((F + I - full * W, F, I)))


def _zb_h2(x: Pipes) -> Floats:
    """(p - 1) max(F + I - 2 W, F, I - F) from 2 p - 1 micro-batches on."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    full = np.clip(x.filled, 0.0, 2.0)
    ahead = np.maximum(full - 1, 0.0)
    return _with_bubble(x, (x.p - 1) * largest((F + I - full * W, F, I - ahead * F)))


def _zb_v(x: Pipes) -> Floats:
    """(p - 1) max(2 I - 2 W, I, 2 F - I, 2 F - 2 W) from 2 p - 1 micro-batches on."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    full = np.clip(x.filled - 1, 0.0, 1.0)
    fewer = np.clip(1 - x.filled, 0.0, 1.0)  # micro-batches than ranks
    early = 2 * fewer * F + 2 * I - 2 * full * W
    late = np.where(full > 0, 2 * F - full * np.minimum(I, 2 * W), 0.0)
    return _folded(x, (x.p - 1) * largest((early, I, late)))


def _dualpipe(x: Pipes) -> Floats:
    """max[(p/2 - 1)(F + I - W), (p/2 - 1) F, (p - 2) I - F - (p/2 - 1) W]."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    half = x.p / 2 - 1
    return _folded(x, largest((half * (F + I - W), half * F, half * (2 * I - W) - F)))


def _dualpipev(x: Pipes) -> Floats:
    """max[(p - 1)(F + I - W), (p - 1) F, 2 (p - 1) I - F - (p - 1) W]."""
    F, I, W = x.passes.each  # noqa: E741  # the letters of the legend
    less = x.p - 1
    return _folded(x, largest((less * (F + I - W), less * F, less * (2 * I - W) - F)))


FORMULAS: dict[str, Callable[[Pipes], Floats]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-v": _zb_v,
    "dualpipe": _dualpipe,
    "dualpipev": _dualpipev,
}


def held(name: str, p: Integers, m: Integers, v: Integers, rank: Integers) -> Integers:
    """Micro-batches whose activations a rank holds at its peak, counted per stage.

        gpipe          m
        1f1b           min(p - r, m)
        interleaved    min((v - 1) p + 2 (p - 1 - r) + 1, v m)
        zb-h1          min(p, m)
        zb-h2          min(2 p - 1, m)
        zb-v           min(2 p, 2 m, m + r + 1)
        dualpipe       p + 1
        dualpipev      2 p + 1

    Counted on the rows of the schedules, as `simulate.peak_in_flight` does.
    """
    ahead = 2 * (p - 1 - rank)
    most = {
        "gpipe": m,
        "1f1b": p - rank,
        "interleaved": np.minimum((v - 1) * p + ahead + 1, v * m),
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": np.minimum(np.minimum(2 * p, 2 * m), m + rank + 1),
        "dualpipe": p + 1,
        "dualpipev": 2 * p + 1,
    }[name]
    capped = np.minimum(most, m) if name in ("1f1b", "zb-h1", "zb-h2") else most
    return np.asarray(capped, dtype=np.int64)


@dataclass(frozen=True)
class Ranks:
    """The ranks of every variant that differ, as tables of shape (variants, kinds of rank).

    The first kind is rank 0, the second the last rank; the others stand for ranks between them,
    each for all that hold as many blocks: for the one of them that holds most micro-batches.

    Attributes:
        dense, routed: blocks of a rank, without and with experts.
        place: the pipeline rank.
        last: 1 where it computes the loss.
        stages: how many stages a rank holds, of shape (variants,).
        copies: how often the ranks together hold the model, of shape (variants,).
        first_dense, first_routed: blocks of the first stage, of shape (variants,).
        number: of kinds, of shape (variants,); what stands behind them is rank 0 again.
    """

    dense: Integers
    routed: Integers
    place: Integers
    last: Integers
    stages: Integers
    copies: Integers
    first_dense: Integers
    first_routed: Integers
    number: Integers

    def kinds(self, variant: Integers) -> int:
        """How many kinds of rank these variants have at the most."""
        return int(self.number[variant].max(initial=0))

    def of(self, variant: Integers, kind: int) -> tuple[Integers, Integers, Integers]:
        """Blocks without and with experts of one kind of rank, and whether it has the loss."""
        return self.dense[variant, kind], self.routed[variant, kind], self.last[variant, kind]


class _Rank(NamedTuple):
    """What tells one rank from another."""

    dense: int
    routed: int
    place: int
    last: int


def ranks_of(shape: ModelShape, variants: Sequence[Variant]) -> Ranks:
    """The ranks of every variant; one with more stages than layers holds nothing."""
    found = [_ranks(shape, variant) for variant in variants]
    kinds = max((len(ranks) for ranks in found), default=2)
    padded = [ranks + [ranks[0]] * (kinds - len(ranks)) for ranks in found]
    table = np.array(padded, dtype=np.int64).reshape(len(variants), kinds, 4)
    firsts = [_first_stage(shape, variant) for variant in variants]
    first_dense, first_routed = np.array(firsts, dtype=np.int64).reshape(-1, 2).T
    layouts = [v.layout for v in variants]
    stages = np.array([len(stages_of_rank(each, 0)) for each in layouts], dtype=np.int64)
    copies = stages // np.array([each.chunks for each in layouts], dtype=np.int64)
    dense, routed, place, last = np.moveaxis(table, 2, 0)
    number = np.array([len(ranks) for ranks in found], dtype=np.int64)
    return Ranks(dense, routed, place, last, stages, copies, first_dense, first_routed, number)


def _ranks(shape: ModelShape, variant: Variant) -> list[_Rank]:
    """The ranks of one variant that differ."""
    p, layout = variant.pp, variant.layout
    if variant.num_stages > shape.layers:
        return [_Rank(0, 0, 0, 0), _Rank(0, 0, p - 1, 1)]
    dense, sizes = _blocks(shape, layout)
    ranks = []
    for place in range(p):
        stages = list(stages_of_rank(layout, place))
        plain, blocks = int(dense[stages].sum()), int(sizes[stages].sum())
        ranks.append(_Rank(plain, blocks - plain, place, int(layout.num_stages - 1 in stages)))
    between = ranks[1:-1] if variant.schedule == "zb-v" else ranks[-2:0:-1]
    unlike = {(rank.dense, rank.routed): rank for rank in between}  # the last of its kind stays
    ahead = -1 if variant.schedule == "zb-v" else 1
    return [ranks[0], ranks[-1], *_largest(list(unlike.values()), ahead)]


def _largest(ranks: list[_Rank], ahead: int) -> list[_Rank]:
    """Without those that another one exceeds in all that it holds; earlier places hold more."""

    def exceeds(one: _Rank, other: _Rank) -> bool:
        more = one.dense >= other.dense and one.routed >= other.routed
        return more and ahead * one.place <= ahead * other.place and one != other

    return [rank for rank in ranks if not any(exceeds(other, rank) for other in ranks)]


def _first_stage(shape: ModelShape, variant: Variant) -> tuple[int, int]:
    if variant.num_stages > shape.layers:
        return 0, 0
    dense, sizes = _blocks(shape, variant.layout)
    return int(dense[0]), int(sizes[0] - dense[0])


def _blocks(shape: ModelShape, layout: Layout) -> tuple[Integers, Integers]:
    """Blocks without experts, and all blocks, of every stage."""
    sizes = np.array(layout.layers_of_stages(shape.layers), dtype=np.int64)
    plain = shape.dense_layers if shape.is_moe else shape.layers
    return np.clip(plain - (np.cumsum(sizes) - sizes), 0, sizes), sizes


def held_by(rows: Rows, variants: Sequence[Variant], place: Integers) -> Floats:
    """Micro-batches held by one rank of every row, counted per stage, of shape (rows, 1)."""
    result = np.empty(place.shape)
    chunks = np.array([v.v for v in variants], dtype=np.int64)[rows.variant]
    for name, which in runs(variants, rows.variant[:, 0]):
        columns = (column[which] for column in (rows.pp, rows.m, chunks, place))
        result[which] = held(name, *columns)
    return result
