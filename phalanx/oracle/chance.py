"""A device that rounds otherwise: the result of every operation moves by chance.

By up to one unit in its last place, forward and backward (Monte Carlo arithmetic: Parker 1997, UCLA
CSD-970002, section 4); and what is kept in few bits goes to the neighbour here and there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Of the elements of a moment in 16 bits, how many a draw rounds to the neighbour: far more than do,
# since a layout's rounding meets one in a hundred thousand, and a few draws would meet none.
FLIPS = 1 / 64

# Operations that round; what only moves numbers about, or compares them, does not.
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ELEMENTWISE = {
    *("add", "sub", "rsub", "mul", "div", "_to_copy", "rsqrt", "sqrt", "exp", "log", "pow"),
    *("reciprocal", "sigmoid", "sigmoid_backward", "silu", "silu_backward", "gelu"),
    *("gelu_backward", "square", "cos", "sin"),
}
_REDUCTIONS = {
    *("sum", "mean", "logsumexp", "_softmax", "_softmax_backward_data", "_log_softmax"),
    *("_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"),
    *("embedding_dense_backward", "index_put"),
}
_ROUNDS = _PRODUCTS | _ELEMENTWISE | _REDUCTIONS


class MovedByChance(TorchDispatchMode):
    """Moves the result of every operation that rounds by up to a unit in its last place.

    Results in fp64 stay: beside shorter formats they are exact.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute, and move what was computed."""
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _ROUNDS and all(map(_may_be_rounded, (args[0], found))):
            return self._moved(found)
        return found

    def _moved(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps
        factor = torch.rand(x.shape, generator=self._generator).mul_(2 * eps).add_(1 - eps)
        return factor.mul_(x).to(x.dtype)

    def neighbour(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Some elements of a tensor that is about to be rounded, moved to the next number.

        Args:
            x: of any shape; wide.
            dtype: that it is rounded to.
        """
        chosen = torch.rand(x.shape, generator=self._generator) < FLIPS
        away = torch.randint(0, 2, x.shape, generator=self._generator) * 2 - 1
        return torch.where(chosen, x * (1 + torch.finfo(dtype).eps * away), x)


def _may_be_rounded(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
