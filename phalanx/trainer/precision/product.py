"""The seam behind which a matrix product chooses its number format and its kernel.

A projection y = x w^T is three products: itself, dx = g w and dw = g^T x for g, the gradient of
y. Each of them reads two operands. A `Multiplier` says how a tensor becomes an operand, and how two
operands multiply; what is cut, gathered and saved between them is `trainer/parallel/tensor.py`'s.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from phalanx.trainer.ops.kernels import times

# Which dim of a matrix [n_out, n_in] tensor-parallel ranks divide, if they do not hold all of it.
MatrixCut = Literal["out", "in", "whole"]


class Operand(NamedTuple):
    """What a product reads of one tensor.

    Attributes:
        data: [..., n], perhaps in low precision.
        scale: what `data` is multiplied with to mean the tensor: one number for all of it (no
            dims), or one for each stretch of each row (as many dims as `data`, cut and gathered
            with it); None where `data` is the tensor.
    """

    data: Tensor
    scale: Tensor | None = None


class Gradient(NamedTuple):
    """The gradient of a projection's output, as its two products read it."""

    for_input: Operand
    for_weight: Operand


class Multiplier(Protocol):
    """How one projection multiplies. Within a step it says the same thing twice alike."""

    def input(self, x: Tensor) -> Operand:
        """What is gathered, multiplied and saved for backward of this rank's part of the input."""

    def weight(self, w: Tensor, scale: Tensor | None = None) -> Operand:
        """What is multiplied of the matrix [n_out, n_in].

        Args:
            w: this rank's part, in the dtype of computation.
            scale: of the operand that the forward pass made of it, if it did.
        """

    def gradient(self, g: Tensor) -> Gradient:
        """What is multiplied of the output's gradient [tokens, n_out]."""

    def forward(self, x: Operand, w: Operand) -> Tensor:
        """Compute x w^T: [..., n_in] to [..., n_out].

        Args:
            x: as `input` gave it, perhaps gathered since; [..., n_in].
            w: as `weight` gave it, [n_out, n_in].
        """

    def input_gradient(self, g: Operand, w: Operand) -> Tensor:
        """Compute g w: [tokens, n_in].

        Args:
            g: what `gradient` gave for this product; it means [tokens, n_out].
            w: as `weight` gave it, [n_out, n_in].
        """

    def weight_gradient(self, g: Operand, x: Operand) -> Tensor:
        """Compute g^T x, over all tokens: [n_out, n_in].

        Args:
            g: what `gradient` gave for this product; it means [tokens, n_out].
            x: as `input` gave it, perhaps gathered since; [..., n_in].
        """


class Plain:
    """Operands are the tensors themselves, multiplied in their own dtype."""

    def input(self, x: Tensor) -> Operand:
        """The input itself."""
        return Operand(x)

    def weight(self, w: Tensor, scale: Tensor | None = None) -> Operand:
        """The matrix itself.

        Args:
            w: [n_out, n_in].
            scale: not needed.
        """
        return Operand(w)

    def gradient(self, g: Tensor) -> Gradient:
        """The gradient itself."""
        return Gradient(Operand(g), Operand(g))

    def forward(self, x: Operand, w: Operand) -> Tensor:
        """Compute x w^T: [..., n_in] to [..., n_out].

        Args:
            x: [..., n_in].
            w: [n_out, n_in], of the same dtype.
        """
        return times(x.data, w.data)

    def input_gradient(self, g: Operand, w: Operand) -> Tensor:
        """Compute g w: [tokens, n_in].

        Args:
            g: [tokens, n_out].
            w: [n_out, n_in], of the same dtype.
        """
        return times(g.data, w.data.t())

    def weight_gradient(self, g: Operand, x: Operand) -> Tensor:
        """Compute g^T x, over all tokens: [n_out, n_in].

        Args:
            g: [tokens, n_out].
            x: [..., n_in], of the same dtype.
        """
        return g.data.t() @ x.data.flatten(0, -2)


PLAIN = Plain()
Products = Callable[
    [str, MatrixCut], Multiplier
]  # how the projection of this name, cut so, multiplies


def plain(name: str, cut: MatrixCut) -> Multiplier:
    """Every projection multiplies in the dtype of computation.

    Args:
        name: of the projection; makes no difference here.
        cut: likewise.
    """
    return PLAIN
