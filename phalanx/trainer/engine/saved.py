"""What forward saves for backward: a tensor as it is, on the host, or only how to make it again.

Recomputing a part of a block needs no second graph: autograd's nodes stay as forward made them,
and only a tensor that they saved is freed and computed once more when backward asks for it. Which
tensors a part stands for is said beside its twin, in phalanx/cost/saved.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from phalanx.trainer.engine.offload import HostBuffers

Make = Callable[..., Tensor | Sequence[Tensor]]

_INCLUDED = {"mlp": ("activation",), "operators": ("norms", "activation")}


class _Recipe:
    """How to make some tensors again, and those that were made, until all who read them have."""

    def __init__(self, make: Make, inputs: Sequence["_Packed"]) -> None:
        self._make, self._inputs = make, inputs
        self._made: Sequence[Tensor] = ()
        self.readers = 0

    def read(self, index: int) -> Tensor:
        """One of the tensors, for one of its readers."""
        if not self._made:
            with torch.no_grad():
                made = self._make(*(x.read() for x in self._inputs))
            self._made = (made,) if isinstance(made, Tensor) else tuple(made)
        tensor = self._made[index]
        self.readers -= 1
        if self.readers == 0:
            self._made = ()
        return tensor


class _Offloaded:
    """A stretch of memory that is on the host until somebody reads it."""

    def __init__(self, x: Tensor, host: HostBuffers) -> None:
        whole = x.new_empty(0).set_(x.untyped_storage())
        self._host, self._buffer = host, host.put(whole)
        self._back: Tensor | None = None
        self.readers = 0

    def read(self, _: int) -> Tensor:
        """All of it, for one of its readers."""
        back = self._host.get(self._buffer) if self._back is None else self._back
        self.readers -= 1
        self._back = back if self.readers else None
        return back


class _Packed(NamedTuple):
    """One tensor that somebody will read in backward, as a view of what is saved or made again.

    Attributes:
        source: the tensor itself; or where it is or how it is made, and which of the results.
        size, stride, offset: of the view.
    """

    source: Tensor | tuple[_Recipe | _Offloaded, int]
    size: Sequence[int] = ()
    stride: Sequence[int] = ()
    offset: int = 0

    def read(self) -> Tensor:
        """The tensor; call it once."""
        if isinstance(self.source, Tensor):
            return self.source
        origin, index = self.source
        return origin.read(index).as_strided(self.size, self.stride, self.offset)


class SavedTensors:
    """Decides, tensor by tensor, what one stage saves for backward.

    Attributes:
        parts: what of each block is made again; see `core.layout.RECOMPUTE_PARTS`.
        host: where the rest goes between forward and backward; None leaves it where it is.
    """

    def __init__(
        self, parts: frozenset[str] = frozenset(), host: HostBuffers | None = None
    ) -> None:
        self.parts = parts.union(*(_INCLUDED.get(part, ()) for part in parts))
        self.host = host
        self._found: dict[int, tuple[Tensor, _Recipe | _Offloaded, int]] = {}
        self._stays: set[int] = set()

    def exclude(self, *tensors: Tensor) -> None:
        """These stay on the device: the vectors whose parts are the parameters."""
        self._stays.update(_storage(x) for x in tensors)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Decide about all that autograd saves in here: the forward of one block."""
        if not (self.parts or self.host) or not torch.is_grad_enabled():
            yield
            return
        try:
            with saved_tensors_hooks(self._pack, lambda packed: cast(_Packed, packed).read()):
                yield
        finally:
            self._found.clear()

    def run(self, part: str, make: Make, *inputs: Tensor) -> list[Tensor]:
        """Compute `make(*inputs)`; if `part` is made again, save none of it.

        Args:
            part: of the block; "norms", "mlp" and so on.
            make: gives one tensor or several, each with memory of its own.
            inputs: all tensors that it needs, parameters left out.
        """
        made = make(*inputs)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        self.forget(part, outputs, make, *inputs)
        return outputs

    def forget(self, part: str, outputs: Sequence[Tensor], make: Make, *inputs: Tensor) -> None:
        """Save none of `outputs`, which are as `make(*inputs)` gives them, if `part` is made again.

        What is saved of them from here on, by whatever operation, is made again in backward.

        Args:
            part: of the block; "norms", "mlp" and so on.
            outputs: each with memory of its own.
            make: gives them again, in the same order.
            inputs: all tensors that it needs, parameters left out.
        """
        if part not in self.parts or not torch.is_grad_enabled():
            return
        if all(_storage(x) in self._found for x in outputs):
            return
        recipe = _Recipe(make, [self._pack(x.detach()) for x in inputs])
        for index, x in enumerate(outputs):
            assert x.untyped_storage().nbytes() == x.nbytes, "it shares memory with another tensor"
            self._found[_storage(x)] = x, recipe, index

    def _pack(self, x: Tensor) -> _Packed:
        found = self._found.get(_storage(x)) or self._offload(x)
        if found is None:
            return _Packed(x.detach())  # what a node saves of its own output must not hold the node
        _, origin, index = found
        origin.readers += 1
        return _Packed((origin, index), x.shape, x.stride(), int(x.storage_offset()))

    def _offload(self, x: Tensor) -> tuple[Tensor, _Offloaded, int] | None:
        """Move what `x` is a part of to the host, once for all who save a part of it."""
        if self.host is None or not x.is_floating_point() or _storage(x) in self._stays:
            return None
        offloaded = x.detach(), _Offloaded(x.detach(), self.host), 0
        self._found[_storage(x)] = offloaded
        return offloaded

    def free(self, x: Tensor | None) -> None:
        """Free the memory of a stage's input, which is on the host too."""
        if self.host is not None and x is not None and x.is_leaf and x.requires_grad:
            x.untyped_storage().resize_(0)


def _storage(x: Tensor) -> int:
    """What tensors with the same memory have in common, as long as one of them lives."""
    return int(x.untyped_storage()._cdata)
