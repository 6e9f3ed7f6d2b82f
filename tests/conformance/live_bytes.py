"""Follows every storage that torch makes, from the operation that made it to its end."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sums the storages that are alive after every operation.

    Attributes:
        counts: which tensors' storages count.
        peak: the largest sum.
    """

    def __init__(self, counts: Callable[[Tensor], bool] = lambda _: True) -> None:
        super().__init__()
        self.counts, self.peak = counts, 0
        self._alive: dict[int, Any] = {}

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return sum(ref().nbytes() for ref in [*self._alive.values()])

    def forget(self, which: Callable[[Any], bool]) -> None:
        """Count storages that are alive, and for which `which` holds, no longer; nor the peak."""
        self._alive = {key: ref for key, ref in self._alive.items() if not which(ref())}
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type != "meta" and self.counts(x):
                self._follow(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _follow(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))
