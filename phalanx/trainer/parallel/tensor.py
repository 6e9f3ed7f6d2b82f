"""Tensor parallelism: each matrix cut over ranks, activations stitched together around it.

A pair of matrices is cut by columns, then by rows (Shoeybi et al. 2019, arXiv:1909.08053). With
sequence parallelism what lies between the pairs is cut along the sequence, and each all-reduce
becomes an all-gather and a reduce-scatter of the same volume (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2). Its cost twin is phalanx/cost/messages/tensor.py.

Parts of the sequence travel while others are multiplied: a product by columns begins with the
part that is here, one by rows ends with the part that stays here (Wang et al. 2023, ASPLOS,
"Overlap communication with dependent computation via decomposition"). Without sequence
parallelism each all-reduce stays whole: a piece of it would have to come back before the next
product can begin with it, and sp sends no more.

Shapes: s sequence, b micro-batch, h hidden; s/t where a rank holds only its part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from phalanx.trainer.engine.weight_gradients import WeightGradients
from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.parallel.comm import Group, Pending
from phalanx.trainer.parallel.sequence import CutSequence, fill, part_of
from phalanx.trainer.precision.product import Gradient, Multiplier, Operand, Plain, Products, plain


class Linear(Protocol):
    """What a projection must offer to be computed here."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    product: Multiplier


class TensorParallel(CutSequence):
    """How one rank takes part in the products that its group computes together.

    Attributes:
        products: how each projection multiplies.
        gradients: takes the work that is left for the gradients of weights.
    """

    def __init__(
        self,
        group: Group,
        *,
        sequence: bool,
        products: Products = plain,
        gradients: WeightGradients | None = None,
    ) -> None:
        super().__init__(group, sequence=sequence)
        self.products = products
        self.gradients = gradients or WeightGradients()

    def alone(self) -> "TensorParallel":
        """How this rank computes a product by itself, with matrices that every rank holds whole."""
        me = self.group.ranks[self.group.index]
        group = Group(self.group.axis, (me,), None, self.group.ledger)
        return TensorParallel(
            group, sequence=False, products=self.products, gradients=self.gradients
        )

    def columns(self, x: Tensor, *layers: Linear) -> list[Tensor]:
        """Multiply by matrices cut by columns; the outputs are this rank's columns.

        Args:
            x: [s/t, b, h] under sequence parallelism, else [s, b, h].
            layers: projections of the same input.

        Returns:
            One [s, b, n/t] for each projection.
        """
        weights = [layer.weight for layer in layers]
        products = [layer.product for layer in layers]
        outputs = cast(tuple[Tensor, ...], apply(_Columns, self, products, x, *weights))
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
        if self.in_parts:
            product = _ProductInParts(self, layer.product)
            y = apply(_SummedParts, product, apply(_RowsInParts, product, x, layer.weight))
        else:
            y = self.sum(apply(_Rows, self.gradients, layer.product, x, layer.weight))
        return cast(Tensor, y if layer.bias is None else y + layer.bias)

    def whole(self, x: Tensor) -> Tensor:
        """Put the parts of the sequence together for what this rank alone computes from them.

        Each rank gives back a part of the gradient of what it took, and backward adds them up:
        [s/t, b, h] to [s, b, h].
        """
        return x if self.group.size == 1 else cast(Tensor, apply(_Whole, self, x))

    def sum(self, partial: Tensor) -> Tensor:
        """Add up one partial [s, b, h] per rank; this rank keeps its part of the sequence."""
        if self.group.size == 1:
            return partial
        return cast(Tensor, apply(_Sum, self, partial))

    def product(self, x: Tensor, layer: Linear) -> Tensor:
        """Multiply by this rank's part of a matrix, with no message: [..., n_in] to [..., n_out].

        Args:
            x: what this rank's part multiplies, in the dtype of computation.
            layer: a projection; its bias, if it has one, is added as this rank holds it.
        """
        y = cast(Tensor, apply(_Rows, self.gradients, layer.product, x, layer.weight))
        return y if layer.bias is None else y + layer.bias


class _Columns(torch.autograd.Function):
    """Gather and multiply; backward gathers again rather than keep the whole sequence.

    Both messages of a whole backward travel behind a product: the input is gathered while the
    input gradient is computed, and that is reduced while the weight gradients are computed. In
    an I, which leaves those to W, the input gradient is reduced part by part as it is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, products: list[Multiplier], x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        mine = products[0].input(x)
        whole, parts = tp.gather_parts(mine, "tp input")
        matrices = [product.weight(w) for product, w in zip(products, weights, strict=True)]
        ctx.tp, ctx.products, ctx.scales = tp, products, [w.scale for w in matrices]
        ctx.parameters = weights
        ctx.save_for_backward(*mine, *weights)

        def multiply(x: Operand) -> tuple[Tensor, ...]:
            return tuple(p.forward(x, w) for p, w in zip(products, matrices, strict=True))

        if len(parts) == 1:
            return multiply(parts[0].here())
        outputs = tuple(w.new_empty((*whole.data.shape[:-1], len(w))) for w in weights)
        fill(outputs, parts, multiply)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tp, products = cast(TensorParallel, ctx.tp), cast(list[Multiplier], ctx.products)
        data, scale, *weights = ctx.saved_tensors
        rows = [p.gradient(g.flatten(0, -2)) for p, g in zip(products, grads, strict=True)]
        work = _ColumnsWork(tp, ctx.parameters, products, Operand(data, scale), rows)
        tp.gradients.start(work)
        matrices = [
            p.weight(w, scale) for p, w, scale in zip(products, weights, ctx.scales, strict=True)
        ]
        factors = _Factors(products, [g.for_input for g in rows], matrices)
        dx, reduced = _input_gradient(tp, factors, grads[0], weights[0].shape[1])
        dws = tp.gradients.finish(work)
        reduced.wait()
        return None, None, dx, *dws


class _Factors(NamedTuple):
    """Of a sum of products: how each is computed, its rows and its matrix."""

    products: Sequence[Multiplier]
    rows: Sequence[Operand]
    matrices: Sequence[Operand]


class _ColumnsWork:
    """The gradients of matrices cut by columns: g^T x each, for the gathered input x."""

    def __init__(
        self,
        tp: TensorParallel,
        weights: tuple[Tensor, ...],
        products: Sequence[Multiplier],
        x: Operand,
        rows: Sequence[Gradient],
    ) -> None:
        self.tp, self.weights, self.products = tp, weights, products
        self.x = self.whole = x
        self.for_weights = [g.for_weight for g in rows]
        self.arriving: Sequence[Pending] = ()

    def start(self) -> None:
        self.whole, self.arriving = self.tp.gather_operand(self.x, "tp input again")

    def finish(self) -> tuple[Tensor, ...]:
        for pending in self.arriving:
            pending.wait()
        return tuple(
            product.weight_gradient(g, self.whole)
            for product, g in zip(self.products, self.for_weights, strict=True)
        )


def _input_gradient(
    tp: TensorParallel,
    factors: _Factors,
    grad: Tensor,
    width: int,
) -> tuple[Tensor, Pending]:
    """Start to add up over ranks what each has of the input's gradient.

    In an I, where nothing else is computed meanwhile, each part travels behind the next.

    Args:
        tp: the ranks.
        factors: of a sum of products.
        grad: of an output, [s, b, n]; says in which dtype and shape.
        width: h, of the input.
    """
    t = tp.group.size
    if not (tp.in_parts and tp.gradients.defers):
        whole = _sum_of_products(factors)
        return tp.reduce_sequence(whole.view(*grad.shape[:-1], width), "tp input gradient")
    dx = grad.new_empty((len(grad) // t, *grad.shape[1:-1], width))

    def share(part: int) -> Tensor:
        rows = [part_of(g, part, t) for g in factors.rows]
        return _sum_of_products(factors._replace(rows=rows)).view_as(dx)

    return dx, tp.group.reduce_scatter_parts(dx, share, "tp input gradient")


def _sum_of_products(factors: _Factors) -> Tensor:
    first, *others = zip(*factors, strict=True)
    total = first[0].input_gradient(*first[1:])
    for product, g, w in others:
        total += product.input_gradient(g, w)
    return total


class _Rows(torch.autograd.Function):
    """One product, of this rank's columns with its rows of the matrix."""

    @staticmethod
    def forward(
        ctx: Any, gradients: WeightGradients, product: Multiplier, x: Tensor, weight: Tensor
    ) -> Tensor:
        mine, matrix = product.input(x), product.weight(weight)
        ctx.gradients, ctx.product = gradients, product
        ctx.parameter, ctx.scale = weight, matrix.scale
        ctx.save_for_backward(*mine, weight)
        return product.forward(mine, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        product = cast(Multiplier, ctx.product)
        data, scale, weight = ctx.saved_tensors
        g = product.gradient(grads[0].flatten(0, -2))
        dx = product.input_gradient(g.for_input, product.weight(weight, ctx.scale))
        work = _RowsWork(ctx.parameter, product, Operand(data, scale), g.for_weight)
        return None, None, dx.view(data.shape), *ctx.gradients.finish(work)


class _ProductInParts:
    """What `_RowsInParts` has prepared and `_SummedParts` multiplies."""

    def __init__(self, tp: TensorParallel, product: Multiplier) -> None:
        self.tp, self.product = tp, product
        self.x: Operand | None = None
        self.matrix: Operand | None = None

    def prepare(self, x: Operand, matrix: Operand) -> None:
        self.x, self.matrix = x, matrix

    def share(self, part: int) -> Tensor:
        """This rank's share in one part of the sum: [s/t, b, h]."""
        if self.x is None or self.matrix is None:
            raise ValueError("there is nothing to multiply yet")
        return self.product.forward(part_of(self.x, part, self.tp.group.size), self.matrix)


class _RowsInParts(torch.autograd.Function):
    """A product by rows and its sum, as far as backward has to do with them.

    Gives room for the sum, which `_SummedParts` fills: recomputation, which stops when backward
    has what it needs, gets as far as this, and sends nothing.
    """

    @staticmethod
    def forward(ctx: Any, todo: _ProductInParts, x: Tensor, weight: Tensor) -> Tensor:
        tp, product = todo.tp, todo.product
        mine, matrix = product.input(x), product.weight(weight)
        todo.prepare(mine, matrix)
        ctx.tp, ctx.product = tp, product
        ctx.parameter, ctx.scale = weight, matrix.scale
        ctx.save_for_backward(*mine, weight)
        return weight.new_empty((len(x) // tp.group.size, *x.shape[1:-1], len(weight)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tp, product = cast(TensorParallel, ctx.tp), cast(Multiplier, ctx.product)
        data, scale, weight = ctx.saved_tensors
        whole, parts = tp.gather_parts(Operand(grads[0]), "tp output gradient")
        matrix = product.weight(weight, ctx.scale)
        if isinstance(product, Plain):
            dx = grads[0].new_empty(data.shape)
            fill([dx], parts, lambda g: [product.input_gradient(_flat(g), matrix)])
            g = product.gradient(whole.data.flatten(0, -2))
        else:  # a gradient is seen as a whole before it is rounded to low precision
            for part in parts:
                part.here()
            g = product.gradient(whole.data.flatten(0, -2))
            dx = product.input_gradient(g.for_input, matrix).view(data.shape)
        work = _RowsWork(ctx.parameter, product, Operand(data, scale), g.for_weight)
        return None, dx, *tp.gradients.finish(work)


def _flat(x: Operand) -> Operand:
    """The same rows as a matrix."""
    return Operand(x.data.flatten(0, -2), x.scale)


class _SummedParts(torch.autograd.Function):
    """Multiplies what `_RowsInParts` has prepared, and adds up; its backward is that one's."""

    @staticmethod
    def forward(ctx: Any, todo: _ProductInParts, room: Tensor) -> Tensor:
        ctx.mark_dirty(room)
        todo.tp.group.reduce_scatter_parts(room, todo.share, "tp output").wait()
        return room

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


class _RowsWork:
    """The gradient of a matrix cut by rows: g^T x."""

    def __init__(self, weight: Tensor, product: Multiplier, x: Operand, g: Operand) -> None:
        self.weights, self.product, self.x, self.g = (weight,), product, x, g

    def start(self) -> None:
        """Send nothing: both factors are here."""

    def finish(self) -> tuple[Tensor, ...]:
        return (self.product.weight_gradient(self.g, self.x),)


class _Whole(torch.autograd.Function):
    """Gather the sequence; backward adds up the parts of its gradient."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, x: Tensor) -> Tensor:
        ctx.tp = tp
        whole, pending = tp.gather_sequence(x, "tp input")
        pending.wait()
        return x.view_as(x) if whole is x else whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        tp = cast(TensorParallel, ctx.tp)
        grad = grads[0] if tp.sequence else grads[0].clone()  # it is reduced in place
        dx, pending = tp.reduce_sequence(grad, "tp input gradient")
        pending.wait()
        return None, dx


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
