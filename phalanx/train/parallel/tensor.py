"""Tensor parallelism: each matrix cut over ranks, activations stitched together around it.

A pair of matrices is cut by columns, then by rows (Shoeybi et al. 2019, arXiv:1909.08053). With
sequence parallelism what lies between the pairs is cut along the sequence, and each all-reduce
becomes an all-gather and a reduce-scatter of the same volume (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2). Its cost twin is phalanx/cost/axes/tensor.py.

Shapes: s sequence, b micro-batch, h hidden; s/t where a rank holds only its part.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from phalanx.train.autograd import apply
from phalanx.train.comm import Group, Pending
from phalanx.train.kernels import times


class Linear(Protocol):
    """What a projection must offer to be computed here."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class TensorParallel:
    """How one rank takes part in the products that its group computes together.

    Attributes:
        group: the ranks along tp.
        sequence: whether activations outside the matrix pairs are cut along the sequence.
    """

    def __init__(self, group: Group, *, sequence: bool) -> None:
        self.group = group
        self.sequence = sequence and group.size > 1

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the sequence is cut outside the matrix pairs."""
        return self.group.size if self.sequence else 1

    def my_sequence(self, x: Tensor) -> Tensor:
        """This rank's part of `x` along its first dim, the sequence."""
        return x.chunk(self.sequence_parts)[self.group.index] if self.sequence else x

    def columns(self, x: Tensor, *layers: Linear) -> list[Tensor]:
        """Multiply by matrices cut by columns; the outputs are this rank's columns.

        Args:
            x: [s/t, b, h] under sequence parallelism, else [s, b, h].
            layers: projections of the same input.

        Returns:
            One [s, b, n/t] for each projection.
        """
        weights = [layer.weight for layer in layers]
        outputs = cast(tuple[Tensor, ...], apply(_Columns, self, x, *weights))
        return [
            y if layer.bias is None else y + layer.bias
            for y, layer in zip(outputs, layers, strict=True)
        ]

    def rows(self, x: Tensor, layer: Linear) -> Tensor:
        """Multiply by a matrix cut by rows, and add up the partial products of all ranks.

        Args:
            x: [s, b, n/t], this rank's columns of the previous product.
            layer: a projection; its bias is added once, after the sum.

        Returns:
            [s/t, b, h] under sequence parallelism, else [s, b, h].
        """
        y = self.sum(cast(Tensor, apply(_Rows, x, layer.weight)))
        return y if layer.bias is None else y + layer.bias

    def sum(self, partial: Tensor) -> Tensor:
        """Add up one partial [s, b, h] per rank; this rank keeps its part of the sequence."""
        if self.group.size == 1:
            return partial
        return cast(Tensor, apply(_Sum, self, partial))

    def gather_sequence(self, x: Tensor, purpose: str) -> tuple[Tensor, Pending]:
        """Start to put the parts of the sequence together: [s/t, b, h] to [s, b, h]."""
        if not self.sequence:
            return x, Pending()
        whole = x.new_empty((x.shape[0] * self.group.size, *x.shape[1:]))
        return whole, self.group.all_gather(whole, x.contiguous(), purpose)

    def reduce_sequence(self, x: Tensor, purpose: str) -> tuple[Tensor, Pending]:
        """Start to add up [s, b, h] over ranks, keeping [s/t, b, h]; or all of it without sp."""
        x = x.contiguous()
        if not self.sequence:
            return x, self.group.all_reduce(x, purpose)
        part = x.new_empty((x.shape[0] // self.group.size, *x.shape[1:]))
        return part, self.group.reduce_scatter(part, x, purpose)


class _Columns(torch.autograd.Function):
    """Gather, then multiply; backward gathers again rather than keep the whole sequence.

    Both messages of the backward pass travel behind a product: the input is gathered while the
    input gradient is computed, and that is reduced while the weight gradients are computed.
    """

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.tp = tp
        ctx.save_for_backward(x, *weights)
        whole, pending = tp.gather_sequence(x, "tp input")
        pending.wait()
        return tuple(times(whole, w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tp = cast(TensorParallel, ctx.tp)
        x, *weights = cast(tuple[Tensor, ...], ctx.saved_tensors)
        whole, gathered = tp.gather_sequence(x, "tp input again")
        rows = [g.flatten(0, -2) for g in grads]
        dx_partial = _sum_of_products(rows, weights).view(*grads[0].shape[:-1], -1)
        dx, reduced = tp.reduce_sequence(dx_partial, "tp input gradient")
        gathered.wait()
        inputs = whole.flatten(0, -2)
        dws = [g.t() @ inputs for g in rows]
        reduced.wait()
        return None, dx, *dws


def _sum_of_products(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = times(rows[0], weights[0].t())
    for g, w in zip(rows[1:], weights[1:], strict=True):
        total += times(g, w.t())
    return total


class _Rows(torch.autograd.Function):
    """One product, of this rank's columns with its rows of the matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        rows = grads[0].flatten(0, -2)
        dx = times(rows, weight.t()).view_as(x)
        return dx, rows.t() @ x.flatten(0, -2)


class _Sum(torch.autograd.Function):
    """Add up partial products; its backward hands the sum's gradient to every rank."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, partial: Tensor) -> Tensor:
        ctx.tp = tp
        total, pending = tp.reduce_sequence(partial, "tp output")
        pending.wait()
        if total is partial:
            ctx.mark_dirty(partial)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        tp = cast(TensorParallel, ctx.tp)
        whole, pending = tp.gather_sequence(grads[0], "tp output gradient")
        pending.wait()
        return None, whole
