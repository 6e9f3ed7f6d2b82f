"""One slice of the model: what a pipeline rank computes between two of its messages."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.core.run import Recipe, Run
from phalanx.schedules.layouts import layers_of_stages, placement
from phalanx.trainer import faults
from phalanx.trainer.engine.offload import HostBuffers, memory_of
from phalanx.trainer.engine.saved import SavedTensors
from phalanx.trainer.engine.unit import Source, Unit
from phalanx.trainer.engine.weight_gradients import WeightGradients
from phalanx.trainer.engine.zero import ZeroPolicy
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.block import Block
from phalanx.trainer.model.ends import Embedding, EmbeddingTable, Head
from phalanx.trainer.model.experts import Experts, Router
from phalanx.trainer.model.parameters import Declaration, OwnedParameter, Share, declared_in
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.data import Reducer, ShardedUnit
from phalanx.trainer.parallel.mesh import Mesh
from phalanx.trainer.parallel.tensor import TensorParallel
from phalanx.trainer.precision.dtypes import Dtypes
from phalanx.trainer.precision.product import Products

StagePart = Embedding | Block | Head


@dataclass(frozen=True)
class Stage:
    """A few blocks, with the embedding before the first or the head behind the last.

    Attributes:
        index: which of the schedule's stages.
        parts: what is computed, in order.
        units: of each part, the parameters it needs.
        reducer: of the gradients that this stage makes.
        gradients: does the work of its weights, or defers it where backward is split.
        recomputes: how many blocks run again together in backward, and save only the input of the
            first; 0 runs none.
        saved: decides what else is saved for backward.
    """

    index: int
    parts: tuple[StagePart, ...]
    units: tuple[tuple[ShardedUnit, ...], ...]
    reducer: Reducer
    gradients: WeightGradients
    recomputes: int
    saved: SavedTensors

    @property
    def all_units(self) -> list[ShardedUnit]:
        """Every unit once, in the order of first use."""
        return list(dict.fromkeys(unit for units in self.units for unit in units))

    @property
    def routers(self) -> list[Router]:
        """Of every block with experts, in order."""
        mlps = [part.mlp for part in self.parts if isinstance(part, Block)]
        return [mlp.router for mlp in mlps if isinstance(mlp, Experts)]

    def forward(self, x: Tensor | None, batch: MicroBatch, *, logits: bool = False) -> Tensor:
        """Compute the stage.

        Args:
            x: [s/t, b, h] from the previous stage; None on the first.
            batch: the micro-batch.
            logits: on the last stage, stop before the loss.

        Returns:
            [s/t, b, h]; on the last stage the sum of the losses, or this rank's logits.

        Raises:
            ValueError: the stage has no parts, or lacks the embedding and x is None.
        """
        y = x
        for segment in self._segments():
            with self.saved.watching():
                y = self._segment(segment, y, batch, logits=logits)
            faults.point("forward", tensors=partial(dict, activation=y))
        if y is None:
            raise ValueError(f"stage {self.index} has no parts")
        self.saved.free(x)
        return y

    def _segments(self) -> list[list[int]]:
        """The parts that are computed together: some blocks if they are recomputed, else one."""
        blocks = [i for i, part in enumerate(self.parts) if isinstance(part, Block)]
        size = self.recomputes or 1
        runs = [blocks[at : at + size] for at in range(0, len(blocks), size)]
        return sorted([*runs, *([i] for i in range(len(self.parts)) if i not in blocks)])

    def _segment(
        self, segment: list[int], x: Tensor | None, batch: MicroBatch, *, logits: bool
    ) -> Tensor:
        """Compute a few parts, which run again in backward if they are blocks of such a stage."""
        compute = partial(self._compute, segment, batch=batch, logits=logits)
        block = isinstance(self.parts[segment[0]], Block)
        if not (block and self.recomputes and torch.is_grad_enabled()):
            return compute(x)
        twice = _Twice(compute, partial(compute, again=True))
        return cast(Tensor, checkpoint(twice, x, use_reentrant=False, preserve_rng_state=False))

    def _compute(
        self,
        segment: list[int],
        x: Tensor | None,
        *,
        batch: MicroBatch,
        logits: bool,
        again: bool = False,
    ) -> Tensor:
        """Compute parts one after the other, the weights of the next one on their way.

        Args:
            segment: which.
            x: [s/t, b, h], None for the embedding.
            batch: the micro-batch.
            logits: stop before the loss.
            again: in backward, which needs the weights of the last two next.
        """
        for i in segment:
            for unit in self.units[i]:
                unit.acquire()
            if not again or i < segment[-1]:
                for unit in self.units[i + 1] if i + 1 < len(self.parts) else ():
                    unit.prefetch()
            x = _run(self.parts[i], x, batch, logits=logits)
            if x.requires_grad and not again:
                x.register_hook(lambda _, i=i: self._before_backward(i))
            if not again or i + 2 <= segment[-1]:
                for unit in self.units[i]:
                    unit.release()
        if x is None:
            raise ValueError("a segment has at least one part")
        return x

    def _before_backward(self, i: int) -> None:
        """Have part i's weights here, and those that backward needs next on their way."""
        for unit in self._needed(i):
            unit.acquire()
        if i:
            for unit in self._needed(i - 1):
                unit.prefetch()

    def _needed(self, i: int) -> tuple[ShardedUnit, ...]:
        """What the backward of part i needs: an embedding nothing, a head perhaps only its norm."""
        part = self.parts[i]
        if isinstance(part, Embedding):
            return ()
        return self.units[i][:1] if isinstance(part, Head) and part.chunk else self.units[i]


class _Twice:
    """Does one thing in forward, and another when backward asks for it again."""

    def __init__(self, forward: Callable[..., Tensor], again: Callable[..., Tensor]) -> None:
        self._next, self._again = forward, again

    def __call__(self, x: Tensor) -> Tensor:
        """Do what comes next."""
        now, self._next = self._next, self._again
        return now(x)


def _run(part: StagePart, x: Tensor | None, batch: MicroBatch, *, logits: bool) -> Tensor:
    if isinstance(part, Embedding):
        return part.forward(batch)
    if x is None:
        raise ValueError("only the embedding needs no output of the part before")
    if isinstance(part, Head):
        return part.logits(x) if logits else part.forward(x, batch)
    if not torch.is_grad_enabled():
        return part.forward(x, batch)  # not what was compiled: that would be compiled anew
    return cast(Tensor, part(x, batch))


def build_stages(
    run: Run, mesh: Mesh, precision: Dtypes, products: Products, source: Source
) -> dict[int, Stage]:
    """Build the stages that this rank holds, filled with their first weights from `source`.

    They come in the order of the layers, so that ranks with copies of the same stages have them
    in the same order, and a tied table is made where the model begins.

    Args:
        run: the model and the recipe.
        mesh: the ranks and the layout; it decides which stages.
        precision: dtypes of weights and gradients.
        products: how each projection multiplies.
        source: values of any box of any parameter.

    Returns:
        Each stage by its index in the schedule.

    Raises:
        RefusedError: the model has too few layers for the layout's stages, or they do not add up.
    """
    where = placement(mesh.layout)
    builder = _StageBuilder(run, mesh, products, _UnitMaker(run, mesh, precision, source))
    held = sorted(where.stages_of(mesh.at.pp), key=lambda stage: stage % where.depth)
    return {index: builder.build(index) for index in held}


class _StageBuilder:
    """Builds the stages of one rank, one after the other."""

    def __init__(self, run: Run, mesh: Mesh, products: Products, maker: "_UnitMaker") -> None:
        self.run, self.mesh, self.products, self.maker = run, mesh, products, maker
        self._depth = placement(mesh.layout).depth
        self._layers = layers_of_stages(mesh.layout, run.model.layers)
        offloads = mesh.layout.offload.activations
        self._host = HostBuffers(mesh.device) if offloads else None
        self._table: EmbeddingTable | None = (
            None  # tied, and made for an earlier stage of this rank
        )

    def build(self, index: int) -> Stage:
        """Stage `index` of the schedule."""
        copy, place = divmod(index, self._depth)
        first = sum(self._layers[:place])
        recompute, gradients = self.mesh.layout.recompute, WeightGradients()
        parts = self._parts(range(first, first + self._layers[place]), gradients)
        saved = SavedTensors(recompute.parts, self._host)
        for part in parts:
            if isinstance(part, Block):
                part.save_with(saved)
        elsewhere = {unit for units in self.maker.made.values() for unit in units}
        units = tuple(self.maker.of(part, copy) for part in parts)
        unique = list(dict.fromkeys(unit for group in units for unit in group))
        for unit in unique:
            gradients.adopt(unit, unit.unit.parameters)
            saved.exclude(unit.unit.weights)
        return Stage(
            index=index,
            parts=tuple(parts),
            units=units,
            reducer=Reducer(unique, elsewhere=elsewhere.intersection(unique)),
            gradients=gradients,
            recomputes=recompute.segment,
            saved=saved,
        )

    def _parts(self, layers: range, gradients: WeightGradients) -> list[StagePart]:
        """The embedding if the slice starts the model, its blocks, and the head if it ends it."""
        run, mesh = self.run, self.mesh
        shape, recipe, layout = run.model, run.recipe, mesh.layout
        tp = TensorParallel(
            mesh.tensor,
            sequence=layout.sequence_parallel,
            products=self.products,
            gradients=gradients,
        )
        ep = mesh.expert_type(mesh.expert)
        blocks = [Block(i, shape, recipe, tp, ep) for i in layers]
        if layout.compile:
            for block in blocks:
                compile_block(block, recipe, whole=layout.cp == 1)
        parts: list[StagePart] = [*blocks]
        table = self._table
        if layers.start == 0:
            embedding = Embedding(shape, recipe, tp)
            parts.insert(0, embedding)
            table = embedding.table if shape.tied else None
            self._table = self._table or table
        if layers.stop == shape.layers:
            parts.append(Head(shape, recipe, tp, table, layout.logits))
        return parts


def compile_block(block: Block, recipe: Recipe, *, whole: bool) -> None:
    """Have a block's operations fused; blocks of one shape share what was compiled.

    The mask of dropout is another one in every step, so it stays outside, and so do experts.

    Args:
        block: becomes a compiled one.
        recipe: says whether there is dropout.
        whole: its attention needs no other rank.
    """
    if recipe.dropout:
        block.drop_attention = torch.compiler.disable(block.drop_attention)
        block.drop_mlp = torch.compiler.disable(block.drop_mlp)
    whole = whole and recipe.dropout == 0 and not isinstance(block.mlp, Experts)
    block.compile(fullgraph=whole, dynamic=False)


class _UnitMaker:
    """Makes the units of a rank's parts; a tied table is one unit of two parts."""

    def __init__(self, run: Run, mesh: Mesh, precision: Dtypes, source: Source) -> None:
        self.mesh, self.precision, self.source = mesh, precision, source
        self.memory = memory_of(mesh.layout, mesh.device, run.data.offload_folder)
        self.made: dict[nn.Module, list[ShardedUnit]] = {}
        self._tied_apart = run.model.tied and not placement(mesh.layout).ends_together

    def of(self, part: StagePart, copy: int) -> tuple[ShardedUnit, ...]:
        """The units of a part that belongs to this copy of the model."""
        modules: list[nn.Module] = [part]
        if isinstance(part, Embedding):
            modules = [m for m in (part.table, part.positions) if m is not None]
        elif isinstance(part, Head):
            modules = [part.norm, part.table]
        for module in modules:
            if module not in self.made:
                tied_copy = self._tied_apart and isinstance(part, Head) and module is part.table
                self.made[module] = [
                    self._make(held, counted=copy == 0 and not tied_copy)
                    for held in _shared_and_experts(declared_in(module))
                ]
        return tuple(unit for module in modules for unit in self.made[module])

    def _make(self, held: list[OwnedParameter], *, counted: bool) -> ShardedUnit:
        name, mesh = _unit_name(held[0].declaration), self.mesh
        partitions = ZeroPolicy.of(mesh.layout).partitions
        of_experts = held[0].declaration.expert_dim is not None
        copies = mesh.expert_copies if of_experts else mesh.copies
        unit = Unit(
            name=name,
            held=held,
            tensor=_share(mesh.tensor),
            part=_share(copies.shard if partitions else copies.all),
            precision=self.precision,
            expert=_share(mesh.expert),
        )
        unit.counted = counted and not (partitions and copies.replica.index)
        tied = self._tied_apart and name == "embedding"
        made = ShardedUnit(unit, mesh, copies, self.memory, tied=tied)
        unit.fill(self.source)
        made.release(between_steps=True)
        self.memory.rest(unit.master)
        return made


def _share(group: Group) -> Share:
    """This rank's among the equal parts of what a group divides."""
    return Share(group.size, group.index)


def _shared_and_experts(held: Iterable[OwnedParameter]) -> list[list[OwnedParameter]]:
    """Parameters that all data-parallel ranks hold, and those of experts."""
    groups: dict[bool, list[OwnedParameter]] = {False: [], True: []}
    for one in held:
        groups[one.declaration.expert_dim is not None].append(one)
    return [group for group in groups.values() if group]


def _unit_name(declaration: Declaration) -> str:
    """For example "head", "blocks.3" or "blocks.3.experts"."""
    words = declaration.name.split(".")
    if words[0] != "blocks":
        return words[0]
    return ".".join(words[:2] if declaration.expert_dim is None else words[:3])
