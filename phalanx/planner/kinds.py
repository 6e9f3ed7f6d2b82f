"""The pipeline ranks that differ: a search prices a few ranks of every schedule, not all of them.

Symbols: p pipeline ranks, m micro-batches, v chunks per rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.operator import UnitName
from phalanx.cost.ranks import PipelineRanks, ranks_of
from phalanx.cost.table import Column, Floats, Integers
from phalanx.schedules.formulas import Peaks, Pipes
from phalanx.schedules.layouts import chunks, num_stages, placement, spec_of
from phalanx.schedules.registry import find_schedule


@dataclass(frozen=True)
class RankKinds:
    """Kinds of rank of some pipelines, as tables of shape (pipelines, kinds).

    The first kind is rank 0, the second the last rank; the others stand for ranks between them,
    each for all that hold as much: for the one of them that holds most micro-batches. Pipelines
    with fewer kinds than others repeat rank 0.

    Attributes:
        schedules: of every pipeline.
        blocks: what each kind holds.
        place: its pipeline rank.
        copies: how often the ranks together hold the model, of shape (pipelines,).
        first_dense, first_routed: blocks of the first stage, of shape (pipelines,).
        dense, routed: the most that any one rank has, of shape (pipelines,).
        number: of kinds, of shape (pipelines,).
    """

    schedules: tuple[str, ...]
    blocks: PipelineRanks
    place: Integers
    copies: Integers
    first_dense: Integers
    first_routed: Integers
    number: Integers

    @classmethod
    def of(cls, shape: ModelShape, layouts: Sequence[Layout]) -> "RankKinds":
        """The kinds of rank of each pipeline, in the order of the layouts.

        Args:
            shape: the model.
            layouts: of each its schedule, pp, v and stages. Where a stage has no layers, ranks hold
                nothing: it is refused elsewhere.
        """
        found = [_kinds(shape, layout) for layout in layouts]
        most = max((len(places) for _, places in found), default=2)
        columns = {field.name: [] for field in fields(PipelineRanks)}  # type: ignore[var-annotated]
        stages = max((ranks.sizes.shape[1] for ranks, _ in found), default=1)
        padded = [[*places, *[0] * (most - len(places))] for _, places in found]
        for (ranks, _), places in zip(found, padded, strict=True):
            for name, column in columns.items():
                values = getattr(ranks, name)[places]
                if name == "sizes":
                    values = np.pad(values, ((0, 0), (0, stages - values.shape[1])))
                column.append(values)
        return cls(
            schedules=tuple(layout.schedule for layout in layouts),
            blocks=PipelineRanks(**{name: np.array(column) for name, column in columns.items()}),
            place=np.array(padded, dtype=np.int64),
            copies=np.array([_copies(shape, layout) for layout in layouts], dtype=np.int64),
            first_dense=np.array([_first(ranks)[0] for ranks, _ in found], dtype=np.int64),
            first_routed=np.array([_first(ranks)[1] for ranks, _ in found], dtype=np.int64),
            number=np.array([len(places) for _, places in found], dtype=np.int64),
        )

    def kinds(self, pipeline: Integers) -> int:
        """How many kinds of rank these pipelines have at the most."""
        return int(self.number[pipeline].max(initial=0))

    def blocks_of(self, pipeline: Integers, kind: int, *, sizes: bool = False) -> PipelineRanks:
        """What one kind of rank of every row holds.

        Args:
            pipeline: of every row.
            kind: of rank.
            sizes: whether the sizes of its stages are asked for, which are many numbers.
        """
        blocks = self.blocks
        if not sizes:
            blocks = replace(blocks, sizes=np.zeros((*blocks.dense.shape, 1), dtype=np.int64))
        return blocks.take((pipeline, kind))

    def in_flight(self, pipeline: Integers, kind: int, sizes: Peaks) -> Integers:
        """Micro-batches whose activations it holds at its peak, counted per stage.

        Args:
            pipeline: of every row, of shape (rows,); equal schedules stand together.
            kind: of rank.
            sizes: p, m and v of every row; the rank is filled in.
        """
        place, result = self.place[pipeline, kind], np.zeros(len(pipeline), dtype=np.int64)
        for name, rows in self.runs(pipeline):
            formula = find_schedule(name).in_flight
            assert formula is not None, f"{name} is not to be searched"
            columns = (sizes.p[rows], sizes.m[rows], sizes.v[rows], place[rows])
            result[rows] = formula(Peaks(*columns))
        return result

    def makespans(self, pipes: Pipes, pipeline: Integers) -> Floats:
        """Seconds from the first forward to the last backward, by the closed formulas.

        Args:
            pipes: the rows, of shape (rows, 1) or (rows, shardings).
            pipeline: of every row, of shape (rows,); equal schedules stand together.
        """
        result = np.empty(pipes.worst.shape)
        for name, rows in self.runs(pipeline):
            formula = find_schedule(name).makespan
            assert formula is not None, f"{name} is not to be searched"
            result[rows] = formula(pipes.take(rows))
        return result

    def runs(self, pipeline: Integers) -> Iterator[tuple[str, slice]]:
        """Each schedule, and the rows that have it."""
        names = list(dict.fromkeys(self.schedules))
        codes = np.array([names.index(name) for name in self.schedules])[pipeline]
        bounds = [*np.flatnonzero(np.diff(codes, prepend=-1)).tolist(), len(codes)]
        for start, stop in pairwise(bounds):
            yield names[codes[start]], slice(start, stop)


def _is_empty(shape: ModelShape, layout: Layout) -> bool:
    """Whether a stage has no layers: then it is refused before it is priced."""
    return num_stages(layout) > shape.layers and not layout.stages


def _copies(shape: ModelShape, layout: Layout) -> int:
    return 1 if _is_empty(shape, layout) else placement(layout).copies


def _kinds(shape: ModelShape, layout: Layout) -> tuple[PipelineRanks, list[int]]:
    """All ranks of one pipeline, and the places of those that differ."""
    p = layout.pp
    if _is_empty(shape, layout):
        nothing = np.zeros(2, dtype=np.int64)
        return PipelineRanks(*(nothing,) * 8, sizes=np.zeros((2, 1), dtype=np.int64)), [0, 1]
    ranks = ranks_of(shape, layout)
    in_flight = spec_of(layout).peak_in_flight(p, p, chunks(layout))
    early = in_flight[-1] <= in_flight[0]  # which ranks hold more: early, or late ones
    between = range(p - 2, 0, -1) if early else range(1, p - 1)
    columns = (ranks.dense.tolist(), ranks.routed.tolist(), ranks.longest.tolist())
    held = list(zip(*columns, strict=True))
    unlike = {held[place]: place for place in between}  # the last of its kind stays
    ahead = 1 if early else -1

    def exceeded(place: int) -> bool:
        return any(
            all(more >= less for more, less in zip(held[other], held[place], strict=True))
            and ahead * other <= ahead * place
            and other != place
            for other in unlike.values()
        )

    return ranks, [0, p - 1, *(place for place in unlike.values() if not exceeded(place))]


def _first(ranks: PipelineRanks) -> tuple[int, int]:
    """Blocks without and with experts of the first stage."""
    blocks = int(ranks.sizes[0, 0])
    dense = min(int(ranks.dense[0]), blocks) if ranks.routed[0] else blocks
    return dense, blocks - dense


def busiest(kinds: RankKinds, pipeline: Integers, seconds: Mapping[UnitName, Column]) -> Column:
    """Seconds of one micro-batch on the rank that works longest; copies of a model share them.

    Args:
        kinds: of rank.
        pipeline: of every row, of shape (rows,).
        seconds: of one micro-batch through each unit.
    """
    found: Column = 0.0
    for kind in range(kinds.kinds(pipeline)):
        blocks = kinds.blocks_of(pipeline, kind)
        here = blocks.dense[:, None] * seconds["dense block"]
        if "routed block" in seconds:
            here = here + blocks.routed[:, None] * seconds["routed block"]
        if kind < 2:
            here = here + blocks.first[:, None] * seconds["embedding"]
            here = here + blocks.last[:, None] * seconds["head"]
        found = np.maximum(found, here)
    return found / kinds.copies[pipeline][:, None]
