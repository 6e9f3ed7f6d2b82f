"""What pipeline ranks hold of parameters: state that stays, and units that are whole for a while.

It depends on degrees, on the sharding, and on which blocks a rank has; not on micro-batches.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from phalanx.core.precision import Precision
from phalanx.cost.block_memory import widths
from phalanx.cost.params import copies
from phalanx.cost.ranks import ParameterCounts, PipelineRanks, largest
from phalanx.cost.saved import Stack
from phalanx.cost.state import StateBytes
from phalanx.cost.table import Column, Table


class WholeUnits(NamedTuple):
    """Bytes of gathered weights and of gradients that are not yet reduced, moment by moment.

    Attributes:
        forward: two blocks.
        loss: head and block, and gradients that were left behind.
        matrix: beside them, the gradient of the head.
        first_block, second_block, embedding: in backward, as `cost/memory.py` has them.
        update: copies that bring back weights and moments, where an update may be taken back.
    """

    forward: Column = 0.0
    loss: Column = 0.0
    matrix: Column = 0.0
    first_block: Column = 0.0
    second_block: Column = 0.0
    embedding: Column = 0.0
    update: Column = 0.0


@dataclass(frozen=True)
class ParameterMemory:
    """Parameters of ranks, as ZeRO shards them.

    Attributes:
        table: the layouts; of shape (rows, 1) beside (1, shardings), or as the ranks are.
        blocks: what their pipeline ranks compute.
        params: of each unit.
        stack: what the program keeps.
        zero: what is really sharded, see `Table.zero_stage`.
        stashed: versions of the weights that are held beside the newest (PipeDream).
    """

    table: Table
    blocks: PipelineRanks
    params: ParameterCounts
    stack: Stack
    zero: Column
    stashed: Column = 0

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
        return largest(self.blocks, self.params.dense, self.params.routed + self.params.experts)

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

    @cached_property
    def element(self) -> int:
        """Bytes of a weight as products read it."""
        return widths(self.table.precision)[0]

    @cached_property
    def state(self) -> StateBytes:
        """Bytes of weights, gradients, master and moments that stay."""
        table, zero = self.table, self.zero
        per_param = state_bytes(table.precision, zero, self.stack)
        whole, part = self.shared + self.experts, self.parameters_kept
        spread = [np.where(zero >= stage, part, whole) for stage in range(4)]
        apart = np.where(zero == 1, part, 0.0) if self.stack.reduced_apart else 0.0
        stays = np.where((zero == 3) & ~table.reshard, whole * self.element, 0.0)
        stays = stays + self.stashed * whole * self.element
        state = StateBytes(
            weights=spread[3] * per_param.weights + stays,
            gradients=(spread[2] + apart) * per_param.gradients,
            master=spread[1] * per_param.master,
            moments=spread[1] * per_param.moments,
        )
        if not np.any(self._state_away):
            return state
        nvme = table.offload.test(lambda offload: offload.nvme)
        resident = np.where(nvme | (zero == 3), 0.0, whole * self.element)
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
        kept_here = self.shared / group.shared
        if not self.table.model.is_moe:
            return kept_here
        return kept_here + self.experts / group.experts

    @property
    def _state_away(self) -> Column:
        return self.table.offload.test(lambda offload: offload.state)

    @cached_property
    def whole_units(self) -> WholeUnits:
        """Units in use, moment by moment."""
        block, vocabulary, left = self.block, self.vocabulary, self.left_behind
        one = self.blocks.stages == 1
        still = np.where((self.blocks.last > 0) & one, 0, left)  # the backward of a head waits
        others = np.where(one, 0, np.maximum(left - block, 0))
        before = block + np.maximum(left - vocabulary, 0)
        around = self.gathered(np.minimum(self.blocks.longest, 2) * block + self.tied)
        around = around + self.whole(block + self.tied)
        loss = self.gathered(vocabulary + block) + self.sent(left)
        end = self.gathered(self.tied) + self.whole(vocabulary)
        return WholeUnits(
            forward=self.gathered(2 * block),
            loss=loss,
            matrix=loss + self.whole(vocabulary),
            first_block=around + self.sent(still),
            second_block=around + self.sent(block + others),
            embedding=end + self.sent(before),
            update=self.undo,
        )

    @cached_property
    def undo(self) -> Column:
        """Bytes of the copies that bring back master weights and moments."""
        if not np.any(self.table.optimistic):
            return 0.0
        per_param = state_bytes(self.table.precision, self.zero, self.stack)
        whole = self.shared + self.experts
        kept = np.where(self.zero >= 1, self.parameters_kept, whole)
        master = np.where(per_param.master > 0, per_param.master, self.element)
        stays = self.table.optimistic & ~self._state_away
        return np.where(stays, kept * (master + per_param.moments), 0.0)

    def gathered(self, params: Column) -> Column:
        """Bytes of weights that come and go: the unit in use and the next one are whole.

        Args:
            params: elements of the units that are in use, a column. Weights that stay on the device
                count as nothing here: under ZeRO-0 to 2, or without reshard.
        """
        nvme = self.table.offload.test(lambda offload: offload.nvme)
        comes = (self.zero == 3) & self.table.reshard | nvme
        return params * np.where(comes, self.element, 0) if np.any(comes) else 0.0

    def whole(self, params: Column) -> Column:
        """Bytes of gradients that are whole until they are reduced, under ZeRO-2 and 3.

        Args:
            params: elements that have such gradients, a column.
        """
        if not np.any(self.zero >= 2):
            return 0.0
        return params * np.where(self.zero >= 2, self.stack.gradient_bytes, 0.0)

    def sent(self, params: Column) -> Column:
        """The same on their way: with the part that this rank receives."""
        if not np.any(self.zero >= 2):
            return 0.0
        return self.whole(params) * (1 + 1 / self.table.shards)


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
