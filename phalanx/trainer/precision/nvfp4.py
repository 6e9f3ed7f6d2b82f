"""NVFP4 in emulation: E2M1 values, an E4M3 scale for each 16 of them, an fp32 scale for all.

The scale of the tensor brings the scales of its stretches into the range of E4M3. Matrices are
cut into squares of 16 x 16, so that forward and backward read the same numbers. Operands stay
in the format of the rest until they multiply, since no device here stores four bits.
Source: NVIDIA 2025 (arXiv:2509.25149), section 2 and appendix B. Its stochastic rounding of
gradients and Hadamard transforms are not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.trainer.ops.kernels import times
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.precision.blocks import row_amax, spread, spread_rows, square_amax
from phalanx.trainer.precision.formats import E2M1_LARGEST, E4M3, rounded, rounded_to_e2m1
from phalanx.trainer.precision.multiply import wide_of
from phalanx.trainer.precision.per_tensor import amax_of
from phalanx.trainer.precision.product import Gradient, Operand

STRETCH = 16


@dataclass(frozen=True)
class Nvfp4:
    """One projection in NVFP4. An operand is a tensor and the fp32 scale of all of it.

    Attributes:
        of_input, of_weight, of_gradient: the groups over which their parts are spread.
        rest: dtype of everything that is not in low precision, and of results.
    """

    of_input: Sequence[Group]
    of_weight: Sequence[Group]
    of_gradient: Sequence[Group]
    rest: torch.dtype

    def input(self, x: Tensor) -> Operand:
        """Itself, with the scale of all of it."""
        return _operand(x, self.of_input)

    def weight(self, w: Tensor, scale: Tensor | None = None) -> Operand:
        """Itself, with the scale of all of it.

        Args:
            w: this rank's part, [n_out, n_in].
            scale: of the forward pass, fp32 without dims; None where this is the forward pass.
        """
        return _operand(w, self.of_weight) if scale is None else Operand(w, scale)

    def gradient(self, g: Tensor) -> Gradient:
        """Itself, to be cut along outputs or along tokens, with the scale of all of it."""
        operand = _operand(g, self.of_gradient)
        return Gradient(operand, operand._replace(data=g.t()))

    def forward(self, x: Operand, w: Operand) -> Tensor:
        """Compute x w^T: [..., n_in] to [..., n_out].

        Args:
            x: [..., n_in]; rounded here in stretches along n_in.
            w: [n_out, n_in]; rounded here in squares.

        Raises:
            ValueError: one of them has no scale.
        """
        return times(self._rows(x), self._squares(w)).to(self.rest)

    def input_gradient(self, g: Operand, w: Operand) -> Tensor:
        """Compute g w: [tokens, n_in].

        Args:
            g: [tokens, n_out]; rounded here in stretches along n_out.
            w: [n_out, n_in]; rounded here in squares.

        Raises:
            ValueError: one of them has no scale.
        """
        return times(self._rows(g), self._squares(w).t()).to(self.rest)

    def weight_gradient(self, g: Operand, x: Operand) -> Tensor:
        """Compute g^T x, over all tokens: [n_out, n_in].

        Args:
            g: [n_out, tokens]; rounded here in stretches along tokens.
            x: [..., n_in]; rounded here likewise, of all its leading dims together.

        Raises:
            ValueError: one of them has no scale.
        """
        tokens = self._rows(x._replace(data=x.data.flatten(0, -2).t()))
        return times(self._rows(g), tokens).to(self.rest)

    def _rows(self, operand: Operand) -> Tensor:
        x = operand.data.to(wide_of(self.rest))
        scale = _scales(row_amax(x, STRETCH), operand.scale)
        return _emulated(x, spread_rows(scale, x.shape[-1], STRETCH))

    def _squares(self, operand: Operand) -> Tensor:
        w = operand.data.to(wide_of(self.rest))
        scale = _scales(square_amax(w, STRETCH), operand.scale)
        return _emulated(w, spread(scale, w.shape, STRETCH))


def _operand(x: Tensor, groups: Sequence[Group]) -> Operand:
    amax = amax_of(x, groups)
    return Operand(x, (amax / (E4M3.largest * E2M1_LARGEST)).where(amax != 0, 1.0))


def _scales(amax: Tensor, of_all: Tensor | None) -> Tensor:
    """The scale of each stretch: an E4M3 number times the scale of the tensor."""
    if of_all is None:
        raise ValueError("an operand of NVFP4 has a scale of its own")
    return rounded(amax.float() / E2M1_LARGEST / of_all, E4M3).to(amax.dtype) * of_all


def _emulated(x: Tensor, scale: Tensor) -> Tensor:
    """The numbers that stand for x; zero where the scale itself is too small for E4M3."""
    return (rounded_to_e2m1(x / scale).to(x.dtype) * scale).where(scale != 0, 0.0)
