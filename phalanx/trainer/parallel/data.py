"""Data parallelism and ZeRO: who keeps, gathers and reduces which part of a unit.

The four stages are four policies of one engine (Rajbhandari et al. 2019, arXiv:1910.02054):

    stage  keeps whole              keeps its part of        gradients are reduced
    0      weights, grads, state    -                        once a step, all-reduce
    1      weights, grads           state                    once a step, reduce-scatter
    2      weights                  state, grads             every micro-batch, reduce-scatter
    3      -                        state, grads, weights    every micro-batch, reduce-scatter

A unit whose state lives on the host hands its part of the gradient over as soon as it is reduced;
weights that live in files are gathered before each use, as those of stage 3 are.

Under HSDP the parts are divided among `shard` ranks, and reduced once more over the copies
(Zhao et al. 2023, arXiv:2304.11277, section 3.2.2). Its cost twin is phalanx/cost/messages/data.py.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.trainer.engine.offload import Memory, OnDevice
from phalanx.trainer.engine.unit import Unit
from phalanx.trainer.engine.weight_gradients import Found, Kept
from phalanx.trainer.parallel.comm import Pending
from phalanx.trainer.parallel.mesh import Copies, Mesh


class ShardedUnit:
    """One unit, kept as the layout's ZeRO stage says.

    Attributes:
        unit: the flat vector.
        on_complete: called when the current backward has passed every parameter of the unit.
    """

    def __init__(
        self, unit: Unit, mesh: Mesh, copies: Copies, memory: Memory | None = None, *, tied: bool
    ) -> None:
        """Allocate what this rank keeps.

        Args:
            unit: laid out, without memory.
            mesh: the groups.
            copies: the ranks that hold the same parameters.
            memory: where master weights and reduced gradients live; by default on the device.
            tied: the same weights also live on the other end of the pipeline.
        """
        self.unit, self.mesh, self.copies, self.tied = unit, mesh, copies, tied
        self.memory, stage = memory or OnDevice(mesh.device), mesh.layout.zero_stage
        self.apart = mesh.layout.offload.state
        self.sharded, self.frees_grads = stage >= 1, stage >= 2 or self.apart
        self.frees_weights = stage >= 3 or mesh.layout.offload.nvme
        if unit.shared_stop > unit.partial_stop and mesh.heads.size == 1:
            raise ValueError(f"{unit.name} has shared heads; build_mesh needs model.kv_heads")
        unit.allocate(
            mesh.device,
            self.memory,
            sharded=self.sharded,
            separate=self.frees_weights or self.apart,
        )
        unit.on_gradient(self._arrive)
        self._whole_grad = torch.empty(0) if self.sharded or self.apart else unit.grad
        self._passed: set[int] = set()
        self._kept: Kept | None = None
        self._filled: set[int] = set()
        self._reducing: tuple[Pending, Tensor] | None = None
        self._reduced_before = False
        self._gathering: Pending | None = None
        self._present = True
        self.on_complete: Callable[[], None] = lambda: None

    @property
    def complete(self) -> bool:
        """Whether the current backward has passed every parameter of the unit."""
        return len(self._passed) == len(self.unit.slots)

    # Weights

    def prefetch(self) -> None:
        """Start to gather the weights, if they are not here."""
        if self._present or self._gathering is not None:
            return
        weights = self.unit.weights
        weights.untyped_storage().resize_(weights.nbytes)
        mine = self.memory.load(self.unit.master, weights.dtype)
        self._gathering = self.copies.shard.all_gather(weights, mine, "weights")

    def acquire(self) -> None:
        """Have the whole weights here before they are used."""
        self.prefetch()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self._present = True

    def release(self, *, between_steps: bool = False) -> None:
        """Let go of the whole weights under stage 3; they are gathered again when needed.

        Without `reshard` that waits until the step is over.
        """
        if not (self.frees_weights and (between_steps or self.mesh.layout.reshard)):
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.unit.weights.untyped_storage().resize_(0)
        self._present = False

    def publish(self) -> None:
        """After the optimizer moved this rank's part: make the new weights known to all."""
        unit = self.unit
        if self.frees_weights:
            self.release(between_steps=True)
            return
        mine = unit.weights[unit.low : unit.high]
        if mine.data_ptr() != unit.master.data_ptr():
            mine.copy_(unit.master)
        if self.sharded:
            self._gathering = self.copies.shard.all_gather(unit.weights, mine, "weights")

    # Gradients

    def _arrive(self, index: int, grad: Tensor) -> None:
        """Take a gradient from autograd: into the whole vector, or to what W will do."""
        if self._kept is None:
            self.accumulate(index, grad)
        else:
            self._kept.append(Found(self.unit.parameters[index], grad))
        self.passed(index)

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add one parameter's gradient to the whole vector, in the master dtype."""
        if self._whole_grad.numel() == 0:
            self._whole_grad = torch.empty(
                self.unit.padded, dtype=self.unit.grad.dtype, device=grad.device
            )
        place = self._place(index)
        if index in self._filled:
            place.add_(grad.reshape(-1))
        else:
            place.copy_(grad.reshape(-1))
        self._filled.add(index)

    def passed(self, index: int) -> None:
        """Note that the current backward needs nothing more of parameter `index`."""
        self._passed.add(index)
        if self.complete:
            self.on_complete()

    def _place(self, index: int) -> Tensor:
        slot = self.unit.slots[index]
        return self._whole_grad[slot.start : slot.stop]

    def begin_backward(self, kept: Kept | None) -> None:
        """Forget what the previous backward passed; keep gradients in `kept`, if there is one."""
        self._passed.clear()
        self._kept = kept

    def reduce(self) -> None:
        """Start to add up what has accumulated, over tensor- and data-parallel ranks."""
        self._fill_missing()
        whole = self._whole_grad
        partial = whole[: self.unit.partial_stop]
        if partial.numel():
            self.mesh.tensor.all_reduce(partial, "partial gradients").wait()
        shared = whole[self.unit.partial_stop : self.unit.shared_stop]
        if shared.numel():
            self.mesh.heads.all_reduce(shared, "shared gradients").wait()
        if not self.sharded:
            self._reducing = self.copies.all.all_reduce(whole, "gradients"), whole
            self._forget()
            return
        part = self.unit.grad
        if self._reduced_before or self.apart:
            part = whole.new_empty(part.shape)
        pending = self.copies.shard.reduce_scatter(part, whole, "gradients")
        self._reducing = pending, part
        self._forget()

    def _forget(self) -> None:
        """What has accumulated is on its way."""
        self._filled.clear()
        if self.frees_grads:
            self._whole_grad = torch.empty(0)

    def _fill_missing(self) -> None:
        """Parameters that took no part have a gradient of zero, not none."""
        if self._whole_grad.numel() == 0:
            self._whole_grad = torch.zeros(
                self.unit.padded, dtype=self.unit.grad.dtype, device=self.mesh.device
            )
        for index in range(len(self.unit.slots)):
            if index not in self._filled:
                self._place(index).zero_()
        self._whole_grad[self.unit.slots[-1].stop :].zero_()

    def settle(self) -> None:
        """Finish the reduction under way, and add it to this rank's part."""
        if self._reducing is None:
            return
        pending, part = self._reducing
        pending.wait()
        if self.apart:
            self._hand_over(part)
        elif self.sharded and self._reduced_before:
            self.unit.grad.add_(part)
        self._reduced_before = True
        self._reducing = None

    def _hand_over(self, part: Tensor) -> None:
        """Give this rank's part of the gradient to the memory where the update is made."""
        if self._reduced_before:
            self.unit.grad.add_(part.to(self.unit.grad.device))
        else:
            self.unit.grad.copy_(part)
        self.memory.rest(self.unit.grad)

    def finish(self) -> None:
        """Make `unit.grad` the gradient of the whole batch."""
        self.settle()
        more = [(self.mesh.twins, "gradients both ways")]
        if self.sharded:
            more.insert(0, (self.copies.replica, "gradients of copies"))
        if self.tied:
            more.append((self.mesh.ends, "tied embedding"))
        more = [(group, purpose) for group, purpose in more if group.size > 1]
        if more:
            grad = self.memory.load(self.unit.grad, self.unit.grad.dtype)
            for group, purpose in more:
                group.all_reduce(grad, purpose).wait()
            if grad is not self.unit.grad:
                self.unit.grad.copy_(grad)
        self._reduced_before = False
        if not self.mesh.layout.reshard:
            self.release(between_steps=True)

    def gradients(self) -> Iterator[Tensor]:
        """The gradient that the optimizer reads; it rests when the next one is asked for."""
        yield self.unit.grad
        self.memory.rest(self.unit.grad)


class Reducer:
    """Reduces the units of one stage as backward completes them, in one fixed order.

    The order is that of the backward pass, on every rank, even where one rank's autograd finishes
    in another: so messages of different units never meet.
    """

    def __init__(
        self, units: Sequence[ShardedUnit], elsewhere: Collection[ShardedUnit] = ()
    ) -> None:
        """Take the units of a stage.

        Args:
            units: in the order in which forward first uses them.
            elsewhere: those that another stage shares and reduces; here they only add up.
        """
        self._order = list(reversed(units))
        self._elsewhere = frozenset(elsewhere)
        self._armed = False
        self._next = 0
        self._in_flight: ShardedUnit | None = None

    def arm(self) -> None:
        """From here on, what a backward leaves is final: reduce each unit as it completes."""
        self._armed = True

    def begin_backward(self, kept: Kept | None = None) -> None:
        """Start a backward pass of the stage, or the half of it whose work W will do."""
        self._next = 0
        for unit in self._order:
            unit.on_complete = self._poll
            unit.begin_backward(kept)

    def _poll(self) -> None:
        """Reduce the units whose turn has come."""
        while self._next < len(self._order) and self._order[self._next].complete:
            self._advance()

    def end_backward(self) -> None:
        """Reduce what is left, such as units that no gradient reached."""
        while self._next < len(self._order):
            self._advance()
        self._armed = False

    def _advance(self) -> None:
        unit = self._order[self._next]
        self._next += 1
        if self._armed and unit not in self._elsewhere:
            if unit.frees_grads and self._in_flight is not None:
                self._in_flight.settle()
            unit.settle()
            unit.reduce()
            self._in_flight = unit
        unit.release()
