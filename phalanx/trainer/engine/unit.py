"""A unit: the parameters that are gathered, reduced and updated together, as one flat tensor.

One block is one unit. Laid end to end, its parameters form a vector; data-parallel ranks divide
that vector evenly, whatever the shapes inside it. The order inside it puts together what is
treated alike: first what tensor-parallel ranks must add up, then vectors, then matrices.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from phalanx.trainer.engine.offload import Memory, OnDevice
from phalanx.trainer.engine.zero import ZeroPolicy
from phalanx.trainer.model.parameters import WHOLE, Box, Declaration, OwnedParameter, Share
from phalanx.trainer.precision.dtypes import Dtypes

Source = Callable[[Declaration, Box], Tensor]  # the values of one box of a parameter


class Slot(NamedTuple):
    """Where one parameter lies in the flat vector: elements [start, stop)."""

    declaration: Declaration
    box: Box
    start: int
    stop: int


class Range(NamedTuple):
    """Neighbouring elements of a rank's part of the vector that are treated alike."""

    start: int
    stop: int
    decays: bool


class Unit:
    """The flat vector of one unit, and this rank's part of it.

    Attributes:
        name: of the unit, for example "blocks.3".
        slots: where each parameter lies.
        padded: elements of the vector, with padding at its end to divide evenly.
        weights: compute dtype [padded]; the modules' parameters are views of it.
        low, high: the part whose master weights and optimizer state this rank keeps.
        master: master dtype [high - low].
        is_its_own_master: whether the master weights are the weights themselves.
        grad: gradient dtype [high - low]: what the optimizer reads.
        tp_reduce_stop: up to here lies what all tensor-parallel ranks add up.
        shared_stop: from there up to here, what those add up that hold the same part.
        counted: whether this rank's copy counts in norms and is saved; false on the second copy
            of tied embeddings.
    """

    def __init__(
        self,
        name: str,
        held: Sequence[OwnedParameter],
        tensor: Share,
        part: Share,
        precision: Dtypes,
        expert: Share = WHOLE,
    ) -> None:
        """Lay out the vector.

        Args:
            name: of the unit.
            held: the declarations, and the modules that use them.
            tensor: of the tensors that tp cuts.
            part: of the vector.
            precision: dtypes.
            expert: of the experts.
        """
        self.name = name
        self.precision = precision
        self.tensor = tensor
        self.counted = True
        self._held = sorted(held, key=lambda h: _order(h.declaration, tensor.parts))
        self.slots = tuple(_slots(self._held, tensor, expert))
        size = self.slots[-1].stop
        self.part = part
        self.padded = -(-size // part.parts) * part.parts
        self.low, self.high = 0, self.padded
        self.tp_reduce_stop = max(
            (s.stop for s in self.slots if s.declaration.needs_tp_reduce), default=0
        )
        self.shared_stop = max(
            (s.stop for s in self.slots if _shared(s.declaration, tensor.parts)),
            default=self.tp_reduce_stop,
        )
        self.is_its_own_master = False
        self.parameters: list[nn.Parameter] = []
        self.weights = self.master = self.grad = torch.empty(0)

    @property
    def my_part(self) -> tuple[int, int]:
        """The elements that count as this rank's own, under every ZeRO stage."""
        length = self.padded // self.part.parts
        return self.part.index * length, (self.part.index + 1) * length

    def allocate(
        self, device: torch.device, policy: ZeroPolicy, memory: Memory | None = None
    ) -> None:
        """Make the vectors and bind the modules' parameters to them.

        Args:
            device: where the weights live.
            policy: says of what this rank keeps its part only.
            memory: where the rest lives; by default on the device too.
        """
        compute, master = self.precision.compute, self.precision.master
        gradient = self.precision.gradient
        memory = memory or OnDevice(device)
        self.weights = torch.zeros(self.padded, dtype=compute, device=device)
        if policy.partitions:
            self.low, self.high = self.my_part
        self.is_its_own_master = compute == master and not policy.separates_master
        if self.is_its_own_master:
            self.master = self.weights[self.low : self.high]
        else:
            self.master = memory.zeros(self.high - self.low, master)
        self.grad = memory.zeros(self.high - self.low, gradient)
        self._bind()

    def _bind(self) -> None:
        """Give modules their parameters.

        `.data` cuts the tie between version counters: the vector may be refilled with the same
        values while autograd holds the parameters.
        """
        for slot, (_, owner, attribute) in zip(self.slots, self._held, strict=True):
            view = self.weights[slot.start : slot.stop].view(slot.box.sizes)
            parameter = nn.Parameter(view.data)
            setattr(owner, attribute, parameter)
            self.parameters.append(parameter)

    def fill(self, source: Source) -> None:
        """Set the weights, and this rank's master copy of them."""
        for slot in self.slots:
            values = source(slot.declaration, slot.box).flatten()
            self.weights[slot.start : slot.stop] = values.to(self.weights)
            self._fill_master(slot, values)

    def _fill_master(self, slot: Slot, values: Tensor) -> None:
        start, stop = max(slot.start, self.low), min(slot.stop, self.high)
        if start < stop:
            part = values[start - slot.start : stop - slot.start]
            self.master[start - self.low : stop - self.low] = part.to(self.master)

    def on_gradient(self, action: Callable[[int, Tensor], None]) -> None:
        """Call `action(slot index, gradient)` whenever backward has made a gradient.

        The gradient is then the action's: the parameter keeps none. The action is a bound method,
        held weakly: torch's hooks hide from the garbage collector, and a cycle through them would
        keep an engine, with its memory and its sockets, for ever.
        """
        held = WeakMethod(action)
        for index, parameter in enumerate(self.parameters):

            def hook(p: Tensor, index: int = index) -> None:
                grad, p.grad = p.grad, None
                act = held()
                if grad is not None and act is not None:
                    act(index, grad)

            parameter.register_post_accumulate_grad_hook(hook)

    def optimizer_ranges(self) -> Iterator[Range]:
        """The ranges of `master` that decay alike, padding left out."""
        yield from _merge(
            Range(start - self.low, stop - self.low, slot.declaration.decays)
            for slot, start, stop in self.pieces(self.low, self.high)
        )

    def own_ranges(self) -> Iterator[Range]:
        """The ranges of `master` that this rank alone answers for, in norms and checkpoints."""
        yield from _merge(
            Range(start - self.low, stop - self.low, False) for _, start, stop in self.own_pieces()
        )

    def own_pieces(self) -> Iterator[tuple[Slot, int, int]]:
        """Each slot's stretch of the vector that this rank alone answers for."""
        if not self.counted:
            return
        for slot, start, stop in self.pieces(*self.my_part):
            if self.tensor.index % slot.declaration.copies(self.tensor.parts) == 0:
                yield slot, start, stop

    def pieces(self, low: int, high: int) -> Iterator[tuple[Slot, int, int]]:
        """Each slot's stretch of [low, high) of the vector.

        Args:
            low: the first element, in the vector.
            high: one past the last.

        Returns:
            Slot, start and stop in elements of the vector; slots outside are left out.
        """
        for slot in self.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                yield slot, start, stop


def _order(declaration: Declaration, parts: int) -> tuple[bool, bool, bool]:
    return not declaration.needs_tp_reduce, not _shared(declaration, parts), declaration.decays


def _shared(declaration: Declaration, parts: int) -> bool:
    """Whether it is cut over `parts` ranks, but into fewer."""
    return declaration.tp_dim is not None and declaration.copies(parts) > 1


def _slots(held: Sequence[OwnedParameter], tensor: Share, expert: Share) -> Iterator[Slot]:
    start = 0
    for declaration, _, _ in held:
        box = declaration.box(tensor, expert)
        stop = start + prod(box.sizes)
        yield Slot(declaration, box, start, stop)
        start = stop


def _merge(ranges: Iterator[Range]) -> Iterator[Range]:
    current: Range | None = None
    for found in ranges:
        if current and current.stop == found.start and current.decays == found.decays:
            current = current._replace(stop=found.stop)
            continue
        if current:
            yield current
        current = found
    if current:
        yield current
