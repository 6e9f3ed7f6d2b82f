"""How many bytes a rank needs at its worst moment, by what they are for.

Moments of a backward pass compete for the peak. At each, a rank holds

    moment         activations   logits               weights gathered      gradients whole
    always         A in flight   -                    -                     -
    forward (1)    a block, 2 S  -                    2 blocks              -
    loss           -             peak                 head, block           left behind
    head gradient  -             saved, the larger    head, block, S        left behind, made
                                 of dlogits and G(head)
    first block    R + G(x)      -                    2 blocks, table (2)   block, left behind
    second block   R + G(x) - K  -                    2 blocks, table (2)   block, one sent
    embedding      - stage       -                    table (2), S          table, block, made
    update (3)     - in flight   -                    -                     -

beside its weights, gradients and optimizer state, sharded by ZeRO, and messages of the pipeline.
A activations of a micro-batch on all its stages, K of one block; R what recomputation makes again;
G gradients; S one activation between blocks. (1) Only where activations leave the device. (2) Only
a tied table that is embedding and head at once. (3) Only where an update may be taken back: with
copies of the state that it moves.

Everything is a column over a table of layouts and ranks: a row may be a layout, or a pipeline rank
of one. Symbols: h hidden, f ffn width, V vocabulary, t tp, T tokens of a micro-batch on one rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Literal, NamedTuple

import numpy as np

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.cost.activation_memory import ActivationMemory
from phalanx.cost.block_memory import BF16, BlockMemory
from phalanx.cost.parameter_memory import ParameterMemory, WholeUnits
from phalanx.cost.ranks import ParameterCounts, PipelineRanks, ranks_of
from phalanx.cost.saved import OURS, Stack
from phalanx.cost.table import Column, Integers, Table, Which, some_rows

MomentName = Literal["forward", "loss", "backward", "update"]
CLASSES = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")


class Moment(NamedTuple):
    """What is alive at one moment beside the state and the activations in flight.

    Attributes:
        name: as a report calls it.
        happens: which rows have such a moment.
        activations: made again, less what this pass has freed by now.
        logits: and what the loss holds with them.
        buffers: gradients of activations, and of a product before they are added up.
        whole: units of parameters that are whole.
    """

    name: MomentName
    happens: Column
    activations: Column
    logits: Column
    buffers: Column
    whole: Column

    @property
    def total(self) -> Column:
        """All of it; less than anything where there is no such moment."""
        size = self.activations + self.logits + self.buffers
        if self.happens is not True:
            size = np.where(self.happens, size, -np.inf)
        return size + self.whole


@dataclass(frozen=True)
class RankMemory:
    """Bytes of ranks at their worst moment, in columns; of one rank, in numbers.

    Attributes:
        moment: in forward, at the head, in the backward of what lies before it, or at the update.
        weights: as the products read them, kept all the time.
        gradients: accumulated.
        optimizer: master weights and moments.
        activations: saved for backward by every micro-batch in flight.
        logits: and everything else that the loss holds at the worst moment.
        buffers: tensors that come and go: gathered weights and sequences, gradients on the way.
        reserve: of the driver and the communication library, and what fragmentation wastes.
    """

    moment: Column
    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    reserve: Column

    @property
    def allocated(self) -> Column:
        """What the program itself asks for, as `torch.cuda.max_memory_allocated` counts it."""
        return self.total - self.reserve

    @property
    def total(self) -> Column:
        """All of it: what must fit into the device."""
        return sum(self.by_class().values())

    def by_class(self) -> dict[str, Column]:
        """The parts by name, in the order of a report."""
        return {name: getattr(self, name) for name in CLASSES}


def ours(recipe: Recipe) -> Stack:
    """What our trainer keeps under a recipe: its moments and master weights may be narrower."""
    moments = 2.0 * BF16 if recipe.moments == "bf16" else 0.0
    return replace(OURS, moment_bytes=moments, master_weights=recipe.master_weights == "fp32")


def rank_memory(
    shape: ModelShape,
    layout: Layout,
    seq: int,
    pp_rank: int,
    in_flight: float,
    stack: Stack = OURS,
) -> RankMemory:
    """Bytes of a rank of pipeline rank `pp_rank`: a table of one row.

    Args:
        shape: the model.
        layout: degrees, ZeRO stage, recompute, sp, precision.
        seq: s, tokens per sequence.
        pp_rank: 0 embeds; the last one computes the loss, unless the schedule folds the pipeline.
        in_flight: passes through one of its stages whose activations are alive at the peak, read
            off the schedule.
        stack: what the program keeps, and what the device loses beside it.

    Raises:
        UsageError: no such pipeline rank, or a precision that only a device can resolve.
    """
    if not 0 <= pp_rank < layout.pp:
        raise UsageError(f"pipeline rank {pp_rank} of pp={layout.pp}")
    table = Table.of(shape, Recipe(seq=seq, batch=layout.dp * layout.mb), [layout])
    blocks = ranks_of(shape, layout).take(slice(pp_rank, pp_rank + 1))
    found = _memory(table, blocks, in_flight, stack)
    numbers = {
        field.name: np.broadcast_to(getattr(found, field.name), (1,))[0].item()
        for field in fields(found)
    }
    return RankMemory(**numbers)


def memory_of_ranks(run: Run, in_flight: Sequence[float], stack: Stack = OURS) -> RankMemory:
    """Bytes of every pipeline rank of a run, in columns of shape (p,).

    Args:
        run: its precision resolved.
        in_flight: passes through one of its stages whose activations are alive at the peak, of
            every rank.
        stack: what the program keeps, and what the device loses beside it.
    """
    ranks = ranks_of(run.model, run.layout)
    return _memory(Table.of_run(run), ranks, np.array(in_flight, dtype=np.float64), stack)


def _memory(table: Table, blocks: PipelineRanks, in_flight: Column, stack: Stack) -> RankMemory:
    """The worst moment of the ranks of a table of one row."""
    params = ParameterCounts.of(table, blocks.together[:1])
    of_block = BlockMemory(table, stack)
    held = ActivationMemory(table, blocks, params, in_flight, of_block)
    stashed = np.where(table.asynchronous, in_flight - 1, 0)
    parameters = ParameterMemory(table, blocks, params, stack, table.zero_stage, stashed)
    return worst_moment(held, parameters)


def worst_moment(held: ActivationMemory, parameters: ParameterMemory) -> RankMemory:
    """Bytes of ranks by class, at the moment that needs most.

    Args:
        held: activations and logits of the ranks.
        parameters: and their parameters.
    """
    found = list(moments(held, parameters.whole_units))
    totals = np.stack(np.broadcast_arrays(*(moment.total for moment in found)))
    worst = totals.argmax(axis=0)

    def at_worst(parts: Iterable[Column]) -> Column:
        spread = [np.broadcast_to(part, worst.shape) for part in parts]
        return np.take_along_axis(np.stack(spread), worst[None], axis=0)[0]

    state, stack = parameters.state, held.stack
    classes = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": held.held + at_worst(m.activations for m in found),
        "logits": at_worst(m.logits for m in found),
        "buffers": held.always + at_worst(m.buffers + m.whole for m in found),
    }
    reserve = stack.context + stack.fragmentation * sum(classes.values())
    return RankMemory(moment=at_worst(np.array(m.name) for m in found), reserve=reserve, **classes)


class PlainMoments(NamedTuple):
    """Bytes of each moment beside units that are whole, and beside the state that stays.

    The fields are those of `WholeUnits`; what a rank never comes to is less than anything.
    """

    forward: Column
    loss: Column
    matrix: Column
    first_block: Column
    second_block: Column
    embedding: Column
    update: Column

    @classmethod
    def of(cls, held: ActivationMemory) -> "PlainMoments":
        """Those of ranks, with what is in flight."""
        found = dict.fromkeys(cls._fields, -np.inf)
        for field, moment in moments_by_whole(held, WholeUnits()):
            found[field] = np.maximum(found[field], moment.total)
        always = held.held + held.always
        return cls(**{name: size + always for name, size in found.items()})

    def take(self, which: Which) -> "PlainMoments":
        """Some of the rows."""
        return PlainMoments(*(some_rows(size, which) for size in self))

    def peak(self, whole: WholeUnits, state: Column, place: Integers, stack: Stack) -> Column:
        """All bytes at the worst moment, reserve included.

        Args:
            whole: units of parameters that are whole, of layouts of which each row is one.
            state: bytes of weights, gradients and optimizer that stay, of those layouts.
            place: of every row among them.
            stack: what the program loses beside it.
        """
        happens = [pair for pair in zip(self, whole, strict=True) if np.ndim(pair[0])]
        least = [plain for plain, more in happens if not np.ndim(more)]  # and nothing is whole
        several = [plain + some_rows(more, place) for plain, more in happens if np.ndim(more)]
        worst = reduce(np.maximum, [*least, *several])
        return stack.context + (1 + stack.fragmentation) * (worst + some_rows(state, place))


# The table of this module, row by row.


def moments(held: ActivationMemory, whole: WholeUnits) -> Iterator[Moment]:
    """The moments that compete, in the order in which a pass comes to them.

    Args:
        held: activations and logits of the ranks.
        whole: units of parameters that are whole.
    """
    return (moment for _, moment in moments_by_whole(held, whole))


def moments_by_whole(held: ActivationMemory, whole: WholeUnits) -> Iterator[tuple[str, Moment]]:
    """The moments that compete, each with the field of `WholeUnits` that it goes with.

    A moment that no row comes to is left out.

    Args:
        held: activations and logits of the ranks.
        whole: units of parameters that are whole.
    """
    if np.any(held.away):
        yield "forward", forward(held, whole)
    if np.any(held.blocks.last):
        yield "loss", loss(held, whole)
        yield "loss", logit_gradient(held, whole)
        yield "matrix", head_gradient(held, whole)
    yield "first_block", first_block(held, whole)
    yield "second_block", second_block(held, whole)
    if np.any(held.blocks.first):
        yield "embedding", embedding(held, whole)
    if np.any(held.table.optimistic):
        yield "update", update(held, whole)


def forward(held: ActivationMemory, whole: WholeUnits) -> Moment:
    """A block with all that it saves, while the one before it leaves the device.

    It happens only where activations do leave, and no whole block is computed again.

    Args:
        held: of it the tensors of one block, unfreed, and 2 S.
        whole: of it the two blocks that ZeRO has gathered.
    """
    happens = held.away & ~held.table.recompute.test(lambda mode: mode.segment > 0)
    made = held.block_everything + 2 * held.of_block.boundary
    return Moment("forward", happens, made, 0.0, 0.0, whole.forward)


def loss(held: ActivationMemory, whole: WholeUnits) -> Moment:
    """The logits, and what the cross-entropy makes of them.

    Args:
        held: of it the logits at their peak.
        whole: of it head and block, and gradients that were left behind.
    """
    return Moment("loss", held.blocks.last > 0, 0.0, held.logits_at_loss, 0.0, whole.loss)


def logit_gradient(held: ActivationMemory, whole: WholeUnits) -> Moment:
    """The gradient of the logits, beside those that its products leave.

    Args:
        held: of it what the loss saves, the gradient of the logits, a product's gradient, and S.
        whole: of it head and block, and gradients that were left behind.
    """
    logits = held.logits_saved + held.logit_gradient
    made = held.of_block.boundary + held.made_gradient
    return Moment("loss", held.blocks.last > 0, 0.0, logits, made, whole.loss)


def head_gradient(held: ActivationMemory, whole: WholeUnits) -> Moment:
    """The gradient of the head, added up, when that of the logits is gone.

    Args:
        held: of it what the loss saves, a product's gradient, and S.
        whole: of it head and block, left-behind gradients, and the gradient of the head.
    """
    made = held.of_block.boundary + held.made_gradient
    return Moment("loss", held.blocks.last > 0, 0.0, held.logits_saved, made, whole.matrix)


def first_block(held: ActivationMemory, whole: WholeUnits) -> Moment:
    """The last block of a stage, which comes first in backward.

    Args:
        held: of it R, and the gradients of one block's activations.
        whole: of it two blocks, a tied table, and gradients of a block and of what was left behind.
    """
    made = held.block_gradients
    return Moment("backward", True, held.made_again, 0.0, made, whole.first_block)


def second_block(held: ActivationMemory, whole: WholeUnits) -> Moment:
    """The block before it, while the gradient of the first still travels.

    It happens only where a stage has two blocks or more.

    Args:
        held: of it R less what the first block has freed, and the gradients of one block.
        whole: of it two blocks, a tied table, and gradients of a block and of one on its way.
    """
    again, several = held.made_again - held.block_activations, held.blocks.longest > 1
    return Moment("backward", several, again, 0.0, held.block_gradients, whole.second_block)


def embedding(held: ActivationMemory, whole: WholeUnits) -> Moment:
    """The gradient of the token table, when all blocks of its stage are done.

    Args:
        held: of it what the stage has freed by now, a product's gradient, and S.
        whole: of it the table, its gradient, and that of a block.
    """
    freed = np.where(held.away, 0.0, -held.stage_activations)
    made = held.made_gradient + held.of_block.boundary
    return Moment("backward", held.blocks.first > 0, freed, 0.0, made, whole.embedding)


def update(held: ActivationMemory, whole: WholeUnits) -> Moment:
    """The weights move before it is known whether they should; no activation is left.

    Args:
        held: of it all activations, which are gone, and where updates are optimistic.
        whole: of it the copies that an update keeps.
    """
    return Moment("update", held.table.optimistic, -held.held, 0.0, 0.0, whole.update)
