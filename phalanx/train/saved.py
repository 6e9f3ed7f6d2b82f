"""What forward keeps for backward: a tensor as it is, or only how to make it again.

Recomputing a part of a block needs no second graph: autograd's nodes stay as forward made them,
and only a tensor that they saved is let go and computed once more when backward asks for it. Which
tensors a part stands for is said beside its twin, in phalanx/cost/saved.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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


class _Packed(NamedTuple):
    """One tensor that somebody will read in backward, as a view of what is kept or made again.

    Attributes:
        source: the tensor itself, or the recipe and which of its tensors.
        size, stride, offset: of the view.
    """

    source: Tensor | tuple[_Recipe, int]
    size: Sequence[int] = ()
    stride: Sequence[int] = ()
    offset: int = 0

    def read(self) -> Tensor:
        """The tensor; call it once."""
        if isinstance(self.source, Tensor):
            return self.source
        recipe, index = self.source
        return recipe.read(index).as_strided(self.size, self.stride, self.offset)


class Saved:
    """Decides, tensor by tensor, what one stage keeps for backward.

    Attributes:
        parts: what of each block is made again; see `core.layout.RECOMPUTE_PARTS`.
    """

    def __init__(self, parts: frozenset[str] = frozenset()) -> None:
        self.parts = parts.union(*(_INCLUDED.get(part, ()) for part in parts))
        self._forgotten: dict[int, tuple[Tensor, _Recipe, int]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Decide about all that autograd saves in here: the forward of one block."""
        if not self.parts or not torch.is_grad_enabled():
            yield
            return
        try:
            with saved_tensors_hooks(self._pack, lambda packed: cast(_Packed, packed).read()):
                yield
        finally:
            self._forgotten.clear()

    def run(self, part: str, make: Make, *inputs: Tensor) -> list[Tensor]:
        """Compute `make(*inputs)`; if `part` is made again, keep none of it.

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
        """Keep none of `outputs`, which are as `make(*inputs)` gives them, if `part` is made again.

        What is saved of them from here on, by whatever operation, is made again in backward.
        """
        if part not in self.parts or not torch.is_grad_enabled():
            return
        if all(_storage(x) in self._forgotten for x in outputs):
            return
        recipe = _Recipe(make, [self._pack(x.detach()) for x in inputs])
        for index, x in enumerate(outputs):
            assert x.untyped_storage().nbytes() == x.nbytes, "it shares memory with another tensor"
            self._forgotten[_storage(x)] = x, recipe, index

    def _pack(self, x: Tensor) -> _Packed:
        found = self._forgotten.get(_storage(x))
        if found is None:
            return _Packed(x.detach())  # what a node saves of its own output must not hold the node
        _, recipe, index = found
        recipe.readers += 1
        return _Packed((recipe, index), x.shape, x.stride(), int(x.storage_offset()))


def _storage(x: Tensor) -> int:
    """What tensors with the same memory have in common, as long as one of them lives."""
    return int(x.untyped_storage()._cdata)
