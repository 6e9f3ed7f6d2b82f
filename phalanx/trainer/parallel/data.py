"""Data parallelism: a unit that ranks keep, gather and reduce as their ZeRO policy says.

The policies are in `trainer/engine/zero.py`. Under HSDP the parts are divided among `shard` ranks,
and reduced once more over the copies (Zhao et al. 2023, arXiv:2304.11277, section 3.2.2). Its cost
twin is phalanx/cost/messages/data.py.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.trainer import faults
from phalanx.trainer.engine.offload import Memory, OnDevice
from phalanx.trainer.engine.unit import Unit
from phalanx.trainer.engine.weight_gradients import Deferred, ReadyGradient
from phalanx.trainer.engine.zero import ZeroPolicy
from phalanx.trainer.parallel.comm import Pending
from phalanx.trainer.parallel.mesh import Copies, Mesh


class ShardedUnit:
    """One unit, kept as a ZeRO policy says.

    Attributes:
        unit: the flat vector.
        mesh: the groups.
        copies: the ranks that hold the same parameters.
        policy: what is retained, and when it is reduced and gathered.
        memory: where master weights and reduced gradients live.
        tied: whether the same weights also live on the other end of the pipeline.
        on_complete: called when the current backward has passed every parameter of the unit.
        on_reduce: called with the whole gradient of this rank before it is reduced.
    """

    def __init__(
        self, unit: Unit, mesh: Mesh, copies: Copies, memory: Memory | None = None, *, tied: bool
    ) -> None:
        """Allocate what this rank keeps.

        Args:
            unit: laid out, without memory.
            mesh: the groups; its layout says the policy.
            copies: the ranks that hold the same parameters.
            memory: where master weights and reduced gradients live; by default on the device.
            tied: the same weights also live on the other end of the pipeline.
        """
        self.unit, self.mesh, self.copies, self.tied = unit, mesh, copies, tied
        self.policy = ZeroPolicy.of(mesh.layout)
        self.memory = memory or OnDevice(mesh.device)
        if unit.shared_stop > unit.tp_reduce_stop and mesh.kv_replicas.size == 1:
            raise ValueError(f"{unit.name} has shared heads; build_mesh needs model.kv_heads")
        unit.allocate(mesh.device, self.policy, self.memory)
        unit.on_gradient(self._arrive)
        in_place = not self.policy.partitions and not self.policy.offloads_state
        self._whole_grad = unit.grad if in_place else torch.empty(0)
        self._passed: set[int] = set()
        self._deferred: Deferred | None = None
        self._filled: set[int] = set()
        self._reducing: tuple[Pending, Tensor] | None = None
        self._reduced_before = False
        self._gathering: Pending | None = None
        self._present = True
        self.on_complete: Callable[[], None] = lambda: None
        self.on_reduce: Callable[[Tensor], None] | None = None

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
        """Free the whole weights, if they are not retained; they are gathered again when needed.

        Without `reshard` that waits until the step is over.
        """
        policy = self.policy
        if policy.retains_weights or (policy.retains_until_step_ends and not between_steps):
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.unit.weights.untyped_storage().resize_(0)
        self._present = False

    def all_gather_weights(self) -> None:
        """After the optimizer moved this rank's part: have the new weights on all ranks.

        Where weights are not retained, that waits until they are used.
        """
        unit = self.unit
        if not self.policy.retains_weights:
            self.release(between_steps=True)
            return
        mine = unit.weights[unit.low : unit.high]
        if not unit.is_its_own_master:
            mine.copy_(unit.master)
        if self.policy.partitions:
            self._gathering = self.copies.shard.all_gather(unit.weights, mine, "weights")

    # Gradients

    def _arrive(self, index: int, grad: Tensor) -> None:
        """Take a gradient from autograd: into the whole vector, or to what W will do."""
        if self._deferred is None:
            self.accumulate(index, grad)
        else:
            self._deferred.append(ReadyGradient(self.unit.parameters[index], grad))
        self.passed(index)

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add one parameter's gradient to the whole vector, in the dtype of accumulated gradients.

        After `overwrite` and after a reduction, the first takes the place of what was there.

        Args:
            index: of the parameter, in the order of `unit.slots`.
            grad: as large as what this rank holds of the parameter, in any dtype.
        """
        self.have_gradient()
        place = self._place(index)
        if index in self._filled:
            place.add_(grad.reshape(-1))
        else:
            place.copy_(grad.reshape(-1))
        self._filled.add(index)

    def have_gradient(self) -> None:
        """Have memory for the whole gradient; where it is retained, from the first step on."""
        if self._whole_grad.numel() == 0:
            self._whole_grad = torch.empty(
                self.unit.padded, dtype=self.unit.grad.dtype, device=self.mesh.device
            )

    def passed(self, index: int) -> None:
        """Note that the current backward needs nothing more of parameter `index`."""
        self._passed.add(index)
        if self.complete:
            self.on_complete()

    def _place(self, index: int) -> Tensor:
        slot = self.unit.slots[index]
        return self._whole_grad[slot.start : slot.stop]

    def begin_backward(self, deferred: Deferred | None) -> None:
        """Forget what the previous backward passed; gradients go to `deferred`, if there is one."""
        self._passed.clear()
        self._deferred = deferred

    def overwrite(self) -> None:
        """Let the next gradients take the place of what has accumulated."""
        self._filled.clear()

    def reduce(self) -> None:
        """Start to add up what has accumulated, over tensor- and data-parallel ranks."""
        self._fill_missing()
        whole = self._whole_grad
        faults.point("reduce", tensors=lambda: {f"gradient:{self.unit.name}": whole})
        if self.on_reduce is not None:
            self.on_reduce(whole)
        partial = whole[: self.unit.tp_reduce_stop]
        if partial.numel():
            self.mesh.tensor.all_reduce(partial, "partial gradients").wait()
        shared = whole[self.unit.tp_reduce_stop : self.unit.shared_stop]
        if shared.numel():
            self.mesh.kv_replicas.all_reduce(shared, "shared gradients").wait()
        if not self.policy.partitions:
            self._reducing = self.copies.all.all_reduce(whole, "gradients"), whole
        else:
            part = self.unit.grad
            if self._reduced_before or self.policy.offloads_state:
                part = whole.new_empty(part.shape)
            self._reducing = self.copies.shard.reduce_scatter(part, whole, "gradients"), part
        self.overwrite()
        if not self.policy.retains_gradients:
            self._whole_grad = torch.empty(0)

    def _fill_missing(self) -> None:
        """Parameters that took no part have a gradient of zero, not none."""
        self.have_gradient()
        for index in range(len(self.unit.slots)):
            if index not in self._filled:
                self._place(index).zero_()
        self._whole_grad[self.unit.slots[-1].stop :].zero_()

    def wait(self) -> None:
        """Finish the reduction under way, and add it to this rank's part."""
        if self._reducing is None:
            return
        pending, part = self._reducing
        pending.wait()
        if self.policy.offloads_state:
            self._offload(part)
        elif self.policy.partitions and self._reduced_before:
            self.unit.grad.add_(part)
        self._reduced_before = True
        self._reducing = None

    def _offload(self, part: Tensor) -> None:
        """Give this rank's part of the gradient to the memory where the update is made."""
        if self._reduced_before:
            self.unit.grad.add_(part.to(self.unit.grad.device))
        else:
            self.unit.grad.copy_(part)
        self.memory.rest(self.unit.grad)

    def finish(self) -> None:
        """Make `unit.grad` the gradient of the whole batch; nothing where it is so already."""
        self.wait()
        if not self._reduced_before:
            return
        more = [(self.mesh.pipeline_replicas, "gradients both ways")]
        if self.policy.partitions:
            more.insert(0, (self.copies.replica, "gradients of copies"))
        if self.tied:
            more.append((self.mesh.embedding_group, "tied embedding"))
        more = [(group, purpose) for group, purpose in more if group.size > 1]
        if more:
            grad = self.memory.load(self.unit.grad, self.unit.grad.dtype)
            for group, purpose in more:
                group.all_reduce(grad, purpose).wait()
            if grad is not self.unit.grad:
                self.unit.grad.copy_(grad)
        self._reduced_before = False
        if self.policy.retains_until_step_ends:
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
        self._enabled = False
        self._next = 0
        self._in_flight: ShardedUnit | None = None

    def enable(self) -> None:
        """From here on, what a backward leaves is final: reduce each unit as it completes."""
        self._enabled = True

    def begin_backward(self, deferred: Deferred | None = None) -> None:
        """Start a backward pass of the stage, or the half of it whose work W will do."""
        self._next = 0
        for unit in self._order:
            unit.on_complete = self._poll
            unit.begin_backward(deferred)

    def _poll(self) -> None:
        """Reduce the units whose turn has come."""
        while self._next < len(self._order) and self._order[self._next].complete:
            self._advance()

    def end_backward(self) -> None:
        """Reduce what is left, such as units that no gradient reached."""
        while self._next < len(self._order):
            self._advance()
        self._enabled = False

    def _advance(self) -> None:
        unit = self._order[self._next]
        self._next += 1
        if self._enabled and unit not in self._elsewhere:
            if not unit.policy.retains_gradients and self._in_flight is not None:
                self._in_flight.wait()  # so that no more than two whole gradients are alive
            unit.wait()
            unit.reduce()
            self._in_flight = unit
        unit.release()
