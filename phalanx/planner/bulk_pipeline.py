"""How long pipelines of many layouts take, and what their ranks hold, by closed formulas.

Each schedule brings its own formulas (`schedules/spec.py`); `planner/pace.py` plays the schedules
themselves, and decides among the best layouts.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank; F, I, W seconds of one stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.params import stages_of_rank
from phalanx.planner.candidates import Variant
from phalanx.planner.columns import Floats, Integers, Rows
from phalanx.schedules.formulas import Peaks, Pipes
from phalanx.schedules.layouts import chunks, layers_of_stages, num_stages
from phalanx.schedules.registry import find_schedule


def makespans(pipes: Pipes, variants: Sequence[Variant], variant: Integers) -> Floats:
    """Seconds from the first forward to the last backward of every row.

    Args:
        pipes: the rows, of shape (rows, 1) or (rows, shards).
        variants: schedules with their sizes.
        variant: that of every row, of shape (rows,); equal schedules stand together.
    """
    result = np.empty(pipes.worst.shape)
    for name, rows in runs(variants, variant):
        formula = find_schedule(name).makespan
        assert formula is not None, f"{name} is not to be searched"
        result[rows] = formula(pipes.take(rows))
    return result


def runs(variants: Sequence[Variant], variant: Integers) -> Iterator[tuple[str, slice]]:
    """Each schedule, and the rows that have it."""
    names = list(dict.fromkeys(v.schedule for v in variants))
    codes = np.array([names.index(v.schedule) for v in variants])[variant]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    for start, stop in zip(starts, (*starts[1:], len(codes)), strict=True):
        yield names[codes[start]], slice(int(start), int(stop))


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
    copies = stages // np.array([chunks(each) for each in layouts], dtype=np.int64)
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
        ranks.append(_Rank(plain, blocks - plain, place, int(num_stages(layout) - 1 in stages)))
    in_flight = find_schedule(variant.schedule).peak_in_flight(p, p, variant.v)
    ahead = -1 if in_flight[-1] > in_flight[0] else 1  # which ranks hold more: early, or late ones
    unlike = {(rank.dense, rank.routed): rank for rank in ranks[1:-1][::-ahead]}  # the last stays
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
    sizes = np.array(layers_of_stages(layout, shape.layers), dtype=np.int64)
    plain = shape.dense_layers if shape.is_moe else shape.layers
    return np.clip(plain - (np.cumsum(sizes) - sizes), 0, sizes), sizes


def held_by(rows: Rows, variants: Sequence[Variant], place: Integers) -> Floats:
    """Micro-batches held by one rank of every row, counted per stage, of shape (rows, 1)."""
    result = np.empty(place.shape)
    several = np.array([v.v for v in variants], dtype=np.int64)[rows.variant]
    for name, which in runs(variants, rows.variant[:, 0]):
        formula = find_schedule(name).in_flight
        assert formula is not None, f"{name} is not to be searched"
        result[which] = formula(Peaks(*(x[which] for x in (rows.pp, rows.m, several, place))))
    return result
