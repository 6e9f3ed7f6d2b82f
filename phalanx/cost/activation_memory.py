"""What pipeline ranks hold of activations and logits, before it is known how ZeRO shards them.

Symbols: V vocabulary, t tp, T tokens of a micro-batch on one rank.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phalanx.cost.block_memory import BF16, BlockMemory, Pair, saved_bytes
from phalanx.cost.ranks import ParameterCounts, PipelineRanks, largest
from phalanx.cost.saved import FP32, Stack, head_saved
from phalanx.cost.table import Column, Table

SCORE_GRADIENTS = 2  # of the softmax and of what dropout left of it, while they are differentiated


@dataclass(frozen=True)
class ActivationMemory:
    """What ranks hold beside parameters, their gradients and the state of the optimizer.

    Attributes:
        table: the layouts.
        blocks: what their pipeline ranks compute.
        params: of each unit.
        in_flight: passes through one of their stages whose activations are alive at the peak.
        of_block: what one block saves and makes.
    """

    table: Table
    blocks: PipelineRanks
    params: ParameterCounts
    in_flight: Column
    of_block: BlockMemory

    @property
    def stack(self) -> Stack:
        """What the program keeps."""
        return self.of_block.stack

    @cached_property
    def away(self) -> Column:
        """Where activations leave the device between forward and backward."""
        return self.table.offload.test(lambda offload: offload.activations)

    @cached_property
    def vocabulary(self) -> Column:
        """Parameters of a token table or of a head, where a rank has one."""
        return np.maximum(self.blocks.first, self.blocks.last) * self.params.table

    @cached_property
    def held(self) -> Column:
        """A: of all passes in flight."""
        return np.where(self.away, 0.0, self.in_flight * self.stage_activations)

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
            here = self.table.recompute.pick(lambda mode: mode.segment) == length
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
        return largest(self.blocks, *pair)

    def _least(self, pair: Pair) -> Column:
        dense, routed = pair
        has_dense, has_routed = self.blocks.dense > 0, self.blocks.routed > 0
        least = np.minimum(np.where(has_dense, dense, np.inf), np.where(has_routed, routed, np.inf))
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
