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
        peak: bytes, the largest sum since the last `forget`.
    """

    def __init__(self, counts: Callable[[Tensor], bool] = lambda _: True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counts, self.peak = counts, 0
        self._alive: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._sum = 0
        self._resized: set[int] = set()

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return self._sum + sum(int(self._alive[key]().nbytes()) for key in self._resized)

    def expect_resizing(self, *tensors: Tensor) -> None:
        """Ask some storages again after every operation: none says how they grow and shrink.

        Args:
            tensors: whose memory is freed and had again while they live, as that of weights is.
        """
        keys = {x.untyped_storage()._cdata for x in tensors} & self._alive.keys()
        for key in keys - self._resized:
            self._sum -= self._sizes[key]
            self._sizes[key] = 0
            self._resized.add(key)

    def forget(self, which: Callable[[Any], bool] = lambda _: False) -> None:
        """Begin anew with the peak.

        Args:
            which: of the storages that are alive counts no longer.
        """
        for key, ref in [*self._alive.items()]:
            if which(ref()):
                self._end(key)
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
            self._alive[key] = weakref.ref(storage, lambda _: self._end(key))
            self._sizes[key] = storage.nbytes()
            self._sum += self._sizes[key]

    def _end(self, key: int) -> None:
        self._alive.pop(key, None)
        self._resized.discard(key)
        self._sum -= self._sizes.pop(key, 0)
