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

beside its weights, gradients and optimizer state, sharded by ZeRO, and messages of the pipeline.
A activations of a micro-batch on all its stages, K of one block; R what recomputation makes again;
G gradients; S one activation between blocks. (1) Only where activations leave the device. (2) Only
a tied table that is embedding and head at once.

Everything is a column over a table of layouts and ranks: a row may be a layout, or a pipeline rank
of one. Symbols: h hidden, f ffn width, V vocabulary, t tp, T tokens of a micro-batch on one rank.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Literal, NamedTuple

import numpy as np

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import Precision
from phalanx.core.run import Recipe
from phalanx.cost.block_memory import BF16, BlockMemory, Pair, saved_bytes, widths
from phalanx.cost.params import copies
from phalanx.cost.ranks import ParameterCounts, PipelineRanks, ranks_of
from phalanx.cost.saved import FP32, OURS, Stack, head_saved
from phalanx.cost.state import StateBytes
from phalanx.cost.table import Column, Table

SCORE_GRADIENTS = 2  # of the softmax and of what dropout left of it, while they are differentiated
MomentName = Literal["forward", "loss", "backward"]
CLASSES = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")

class Moment(NamedTuple):
    """What is alive at one moment beside the state and the activations in flight.

    Attributes:
        name: as a report calls it.
        happens: which rows have such a moment.
        activations: made again, less what this pass has freed by now.
        logits: and what the loss holds with them.
        buffers: whole weights and gradients, and gradients of activations.
    """

    name: MomentName
    happens: Column
    activations: Column
    logits: Column
    buffers: Column

    @property
    def total(self) -> Column:
        """All of it; less than anything where there is no such moment."""
        size = self.activations + self.logits + self.buffers
        return size if self.happens is True else np.where(self.happens, size, -np.inf)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of ranks at their worst moment, in columns; of one rank, in numbers.

    Attributes:
        moment: whether that is in forward, at the head, or in the backward of what lies before it.
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


def state_bytes(precision: Precision, zero: Column, stack: Stack) -> StateBytes:
    """Bytes per parameter before ZeRO.

    In fp32 and fp64 the weights are their own master, except under ZeRO-3, where gathered
    weights come and go and only the master stays.

    Args:
        precision: of the layout.
        zero: what is really sharded.
        stack: what the program keeps.

    Raises:
        UsageError: a precision that only a device can resolve, or one without a rule.
    """
    element, master, moments = widths(precision)
    master = master if stack.master_weights else 0
    gathers = np.equal(zero, 3)
    return StateBytes(
        weights=np.where(gathers, 0, element),
        gradients=max(stack.gradient_bytes, element if master == 0 else 0),
        master=np.where(gathers, master or element, master),
        moments=stack.moment_bytes or moments,
    )


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
    params = ParameterCounts.of(table, blocks.together)
    ranks = Ranks(table, blocks, params, in_flight, stack)
    found = ShardedRanks(ranks, table, table.zero_stage).memory()
    numbers = {
        field.name: np.broadcast_to(getattr(found, field.name), (1,))[0].item()
        for field in fields(found)
    }
    return RankMemory(**numbers)


@dataclass(frozen=True)
class Ranks:
    """Ranks of layouts as memory sees them, before it is known how ZeRO shards them.

    Attributes:
        table: the layouts.
        blocks: what their pipeline ranks compute.
        params: of each unit.
        in_flight: passes through one of their stages whose activations are alive at the peak.
        stack: what the program keeps.
    """

    table: Table
    blocks: PipelineRanks
    params: ParameterCounts
    in_flight: Column
    stack: Stack

    @cached_property
    def of_block(self) -> BlockMemory:
        """What one block saves and makes."""
        return BlockMemory(self.table, self.stack)

    # parameters

    @cached_property
    def shared(self) -> Column:
        """Parameters that all data-parallel ranks hold alike."""
        blocks, params = self.blocks, self.params
        ends = blocks.first * params.embedding + blocks.last * params.head
        return blocks.dense * params.dense + blocks.routed * params.routed + ends

    @cached_property
    def experts(self) -> Column:
        """Parameters of experts."""
        return self.blocks.routed * self.params.experts

    @cached_property
    def block(self) -> Column:
        """Parameters of the largest block."""
        return self._most((self.params.dense, self.params.routed + self.params.experts))

    @cached_property
    def vocabulary(self) -> Column:
        """Parameters of a token table or of a head, where a rank has one."""
        return np.maximum(self.blocks.first, self.blocks.last) * self.params.table

    @cached_property
    def tied(self) -> Column:
        """The same if it is embedding and head at once: then it is in use all the way."""
        return self.vocabulary * (self.blocks.together * self.table.model.tied)

    @cached_property
    def left_behind(self) -> Column:
        """Parameters whose gradients still travel from the micro-batch before.

        Each stage waits for its last one when its next backward begins.
        """
        if not self.stack.travels_on:
            return 0
        first = self.blocks.first
        return (self.blocks.stages - first) * self.block + first * self.vocabulary

    # activations

    @cached_property
    def away(self) -> Column:
        """Where activations leave the device between forward and backward."""
        return self.table.offload.test(lambda offload: offload.activations)

    @cached_property
    def alone(self) -> Column:
        """Where a rank has one stage."""
        return self.blocks.stages == 1

    @cached_property
    def stage_activations(self) -> Column:
        """Saved by one micro-batch in one of its stages, on average over them."""
        blocks, (dense, routed) = self.blocks, self.of_block.saved
        saved = blocks.dense * dense + blocks.routed * routed
        for length in {mode.segment for mode in self.table.recompute.values} - {0, 1}:
            here = self.table.recompute.test(lambda mode, k=length: mode.segment == k)
            inputs = blocks.segments(length) * self._least(self.of_block.saved)
            saved = np.where(here, inputs, saved)
        return saved / blocks.stages

    @cached_property
    def block_activations(self) -> Column:
        """K: saved by one micro-batch in one block, the one that saves least."""
        return np.where(self.away, 0.0, self._least(self.of_block.saved))

    @cached_property
    def block_everything(self) -> Column:
        """Saved by one block if nothing were freed, the one that saves most."""
        return self._most(self.of_block.everything)

    @cached_property
    def made_again(self) -> Column:
        """R: what is made or brought again while the backward of a block runs."""
        gone = self._most(self.of_block.made_again)
        if np.any(self.away):
            gone = np.where(self.away, self._most(self.of_block.fetched), gone)
        segments = self.table.recompute.pick(lambda mode: mode.segment)
        if not np.any(segments):
            return gone
        again = np.minimum(segments, self.blocks.longest) * self.block_everything
        return np.where(segments > 0, again - self.block_activations, gone)

    @cached_property
    def block_gradients(self) -> Column:
        """G(x): of one block's activations."""
        return self._most(self.of_block.gradients)

    @cached_property
    def always(self) -> Column:
        """Messages of the pipeline, and what some programs hold at every moment.

        One activation on its way from a neighbouring stage, and one on its way to it. Gradients of
        scores that are in memory. A block's recomputed parts, where we do not know when they go.
        """
        table, cut = self.table, np.where(self.table.sp, self.table.tp, 1)
        held = np.where(table.pp > 1, 2 * self.of_block.boundary / cut, 0.0)
        if not self.stack.fused_attention:
            scores = table.model.heads / table.tp * table.recipe.seq * self.of_block.tokens
            held = held + SCORE_GRADIENTS * BF16 * scores
        if any(self.of_block.by_others(mode) for mode in table.recompute.values):
            held = held + self._most(self.of_block.freed_by_others)
        return held

    def _most(self, pair: Pair) -> Column:
        """The larger of two kinds of block, of those that a rank has."""
        blocks, (dense, routed) = self.blocks, pair
        return np.maximum((blocks.dense > 0) * dense, (blocks.routed > 0) * routed)

    def _least(self, pair: Pair) -> Column:
        dense, routed = pair
        has_dense, has_routed = self.blocks.dense > 0, self.blocks.routed > 0
        least = np.minimum(
            np.where(has_dense, dense, np.inf), np.where(has_routed, routed, np.inf)
        )
        return np.where(has_dense | has_routed, least, 0.0)

    # the loss

    @cached_property
    def logits_saved(self) -> Column:
        """What of the loss is left when the logits of this micro-batch are gone.

        GPipe has saved the logits of all others. Where backward is split, a weight gradient that
        comes later needs the gradient of the logits only.
        """
        table, waits = self.table, self.alone & ~self.away
        saved = head_saved(table.model, self.of_block.element, self.stack)
        one = self.of_block.tokens * saved_bytes(table, lambda _: saved)
        logits, others = self._per_logit(self.stack.logit_kept), one
        if np.any(self.chunk):  # they keep the gradient of the matrix instead
            made = self.made_gradient
            others = np.where(self.chunk > 0, one - logits + made, one)
            one, logits = others, np.where(self.chunk > 0, made, logits)
        elif np.any(self.blocks.splits):
            others = np.where(
                self.blocks.splits > 0, np.minimum(one, self._per_logit(BF16)), others
            )
        waiting = np.where(waits, np.maximum(self.in_flight - 1, 0.0), 0.0)
        return waiting * others + one - logits

    @cached_property
    def logits_at_loss(self) -> Column:
        """What the last rank holds at its loss."""
        table, stack = self.table, self.stack
        worst = np.where(table.tp == 1, stack.logit_peak_whole, stack.logit_peak)
        peak = self._per_logit(worst)
        if np.any(self.chunk):
            peak = np.where(self.chunk > 0, self._chunk_of_logits, peak)
        return self.logits_saved + peak

    @cached_property
    def logit_gradient(self) -> Column:
        """The gradient of the logits, as products read it."""
        whole = self._per_logit(self.of_block.element)
        return np.where(self.chunk > 0, 0.0, whole) if np.any(self.chunk) else whole

    @cached_property
    def chunk(self) -> Column:
        """Tokens whose logits are alive at once, if not all of them are; only ours does so."""
        if not self.stack.parts_as_ledger:
            return 0
        return np.minimum(self.table.logits, self.of_block.tokens)

    @property
    def _chunk_of_logits(self) -> Column:
        """Logits of a few tokens beside the table's gradient as it adds up; and the input's."""
        table, element, wide = self.table, self.of_block.element, max(self.of_block.element, FP32)
        narrow = element if element < wide else 0  # what is in both formats for a moment
        logits = self.chunk * table.model.vocab / table.tp
        several, params = self.of_block.tokens > self.chunk, self.vocabulary
        total, more = np.where(several, wide, 0), np.where(several, narrow, element)
        beside = np.maximum(params * total + logits * (wide + narrow), params * (total + more))
        gathered = np.where(table.sp, 2, 1)
        at_end = params * (total + more) + logits * element
        return np.maximum(beside, at_end) + gathered * self.of_block.boundary

    @cached_property
    def made_gradient(self) -> Column:
        """A gradient of the head as the product leaves it, before it is added up."""
        return self.vocabulary * (self.of_block.element if self.stack.adds_apart else 0)

    def _per_logit(self, size: Column) -> Column:
        return self.of_block.tokens * self.table.model.vocab * size / self.table.tp


@dataclass(frozen=True)
class ShardedRanks:
    """The same ranks with what ZeRO does to them: what stays, and what is whole for a while.

    Attributes:
        ranks: the ranks.
        table: how they are sharded; of shape (rows, 1) beside (1, shardings), or as the ranks are.
        zero: what is really sharded, see `Table.zero_stage`.
    """

    ranks: Ranks
    table: Table
    zero: Column

    def memory(self) -> RankMemory:
        """All classes at the worst moment."""
        moments = list(self.moments())
        totals = np.stack(np.broadcast_arrays(*(moment.total for moment in moments)))
        worst = totals.argmax(axis=0)

        def at_worst(parts: Iterable[Column]) -> Column:
            spread = [np.broadcast_to(part, worst.shape) for part in parts]
            return np.take_along_axis(np.stack(spread), worst[None], axis=0)[0]

        state, ranks = self.state, self.ranks
        classes = {
            "weights": state.weights,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "activations": self.in_flight + at_worst(m.activations for m in moments),
            "logits": at_worst(m.logits for m in moments),
            "buffers": ranks.always + at_worst(m.buffers for m in moments),
        }
        reserve = ranks.stack.context + ranks.stack.fragmentation * sum(classes.values())
        return RankMemory(
            moment=at_worst(np.array(m.name) for m in moments), reserve=reserve, **classes
        )

    def total(self) -> Column:
        """All bytes at the worst moment, reserve included."""
        state, stack = self.state, self.ranks.stack
        worst = reduce(np.maximum, (moment.total for moment in self.moments()))
        held = worst + (self.in_flight + self.ranks.always)
        held = held + (state.weights + state.gradients + state.optimizer)
        return stack.context + (1 + stack.fragmentation) * held

    # the table of this module, row by row

    def moments(self) -> Iterator[Moment]:
        """The moments that compete, in the order in which a pass comes to them."""
        ranks = self.ranks
        if np.any(ranks.away):
            yield self.forward()
        if np.any(ranks.blocks.last):
            yield self.loss()
            yield self.head_gradient()
        yield self.first_block()
        yield self.second_block()
        if np.any(ranks.blocks.first):
            yield self.embedding()

    def forward(self) -> Moment:
        """A block whole, while the one before it leaves the device."""
        ranks = self.ranks
        happens = ranks.away & ~self.table.recompute.test(lambda mode: mode.segment > 0)
        made = ranks.block_everything + 2 * ranks.of_block.boundary
        return Moment("forward", happens, made, 0.0, self.gathered(2 * ranks.block))

    def loss(self) -> Moment:
        """The logits and what the cross-entropy makes of them."""
        ranks = self.ranks
        buffers = self.gathered(ranks.vocabulary + ranks.block) + self.sent(ranks.left_behind)
        return Moment("loss", ranks.blocks.last > 0, 0.0, ranks.logits_at_loss, buffers)

    def head_gradient(self) -> Moment:
        """The gradient of the logits, or of the matrix behind them, whichever is larger."""
        ranks = self.ranks
        matrix, logits = self.whole(ranks.vocabulary), ranks.logit_gradient
        of_logits = logits >= matrix
        buffers = self.gathered(ranks.vocabulary + ranks.block) + self.sent(ranks.left_behind)
        buffers = buffers + (ranks.of_block.boundary + ranks.made_gradient)
        return Moment(
            "loss",
            ranks.blocks.last > 0,
            0.0,
            ranks.logits_saved + np.where(of_logits, logits, 0.0),
            buffers + np.where(of_logits, 0.0, matrix),
        )

    def first_block(self) -> Moment:
        """The first block in backward; the backward of a head has waited for what was sent."""
        ranks = self.ranks
        still = np.where((ranks.blocks.last > 0) & ranks.alone, 0, ranks.left_behind)
        buffers = self._around_blocks + self.sent(still)
        return Moment("backward", True, ranks.made_again, 0.0, buffers)

    def second_block(self) -> Moment:
        """The block before it, while the gradient of the first still travels."""
        ranks = self.ranks
        others = np.where(ranks.alone, 0, np.maximum(ranks.left_behind - ranks.block, 0))
        buffers = self._around_blocks + self.sent(ranks.block + others)
        activations = ranks.made_again - ranks.block_activations
        return Moment("backward", ranks.blocks.longest > 1, activations, 0.0, buffers)

    def embedding(self) -> Moment:
        """The gradient of the token table, when all blocks of its stage are done."""
        ranks = self.ranks
        before = ranks.block + np.maximum(ranks.left_behind - ranks.vocabulary, 0)
        buffers = self.gathered(ranks.tied) + self.whole(ranks.vocabulary) + self.sent(before)
        buffers = buffers + (ranks.made_gradient + ranks.of_block.boundary)
        freed = np.where(ranks.away, 0.0, -ranks.stage_activations)
        return Moment("backward", ranks.blocks.first > 0, freed, 0.0, buffers)

    @cached_property
    def _around_blocks(self) -> Column:
        """Weights and gradients of a block that is differentiated, and of its activations."""
        ranks = self.ranks
        gathered = self.gathered(np.minimum(ranks.blocks.longest, 2) * ranks.block + ranks.tied)
        return ranks.block_gradients + gathered + self.whole(ranks.block + ranks.tied)

    # and its columns

    @cached_property
    def state(self) -> StateBytes:
        """Bytes of weights, gradients, master and moments that stay."""
        table, ranks, zero = self.table, self.ranks, self.zero
        per_param = state_bytes(table.precision, zero, ranks.stack)
        whole, part = ranks.shared + ranks.experts, self.parameters_kept
        spread = [np.where(zero >= stage, part, whole) for stage in range(4)]
        apart = np.where(zero == 1, part, 0.0) if ranks.stack.reduced_apart else 0.0
        stays = np.where((zero == 3) & ~table.reshard, whole * ranks.of_block.element, 0.0)
        state = StateBytes(
            weights=spread[3] * per_param.weights + stays,
            gradients=(spread[2] + apart) * per_param.gradients,
            master=spread[1] * per_param.master,
            moments=spread[1] * per_param.moments,
        )
        if not np.any(self._state_away):
            return state
        nvme = table.offload.test(lambda offload: offload.nvme)
        resident = np.where(nvme | (zero == 3), 0.0, whole * ranks.of_block.element)
        added = np.where(zero < 2, whole * per_param.gradients, 0.0)
        away = self._state_away
        return StateBytes(
            weights=np.where(away, resident + stays, state.weights),
            gradients=np.where(away, added, state.gradients),
            master=np.where(away, 0.0, state.master),
            moments=np.where(away, 0.0, state.moments),
        )

    @cached_property
    def parameters_kept(self) -> Column:
        """Parameters whose state a rank keeps, if ZeRO shards it."""
        group = copies(self.table)
        kept_here = self.ranks.shared / group.shared
        if not self.table.model.is_moe:
            return kept_here
        return kept_here + self.ranks.experts / group.experts

    @property
    def _state_away(self) -> Column:
        return self.table.offload.test(lambda offload: offload.state)

    @property
    def in_flight(self) -> Column:
        """A: activations of all passes in flight."""
        ranks = self.ranks
        return np.where(ranks.away, 0.0, ranks.in_flight * ranks.stage_activations)

    def gathered(self, params: Column) -> Column:
        """Bytes of weights that come and go: the unit in use and the next one are whole."""
        nvme = self.table.offload.test(lambda offload: offload.nvme)
        comes = (self.zero == 3) & self.table.reshard | nvme
        return params * np.where(comes, self.ranks.of_block.element, 0) if np.any(comes) else 0.0

    def whole(self, params: Column) -> Column:
        """Bytes of gradients that are whole until they are reduced, under ZeRO-2 and 3."""
        if not np.any(self.zero >= 2):
            return 0.0
        return params * np.where(self.zero >= 2, self.ranks.stack.gradient_bytes, 0.0)

    def sent(self, params: Column) -> Column:
        """The same on their way: with the part that this rank receives."""
        if not np.any(self.zero >= 2):
            return 0.0
        return self.whole(params) * (1 + 1 / self.table.shards)
