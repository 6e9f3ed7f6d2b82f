"""FP8 with one scale for each short stretch of a row, so that an outlier spoils only its own.

Fine-grained scaling (`fp8-block`): activations and gradients in stretches of 128, matrices in
squares of 128 x 128, E4M3 everywhere, sums promoted to fp32 every 128 values (DeepSeek-AI 2024,
arXiv:2412.19437, section 3.3.2). MXFP8: stretches of 32 along the inner dim of each product,
matrices too (OCP Microscaling Formats 1.0, 2023; Mishra et al. 2025, arXiv:2506.08027).

Scales are powers of two. The input is kept in 8 bits and cut anew, along tokens, for the weight
gradient; between powers of two that loses only what falls below the smallest number.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.trainer.precision.formats import E4M3, power_of_two_scale, rounded
from phalanx.trainer.precision.multiply import unfolded, wide_of
from phalanx.trainer.precision.product import Gradient, Operand


@dataclass(frozen=True)
class Blocks:
    """One projection whose operands have a scale for each stretch of the inner dim.

    Attributes:
        stretch: values that share a scale.
        square: matrices have one scale for stretch x stretch values, the same in both products.
        stored: dtype in which scales travel and are kept.
        rest: dtype of everything that is not in low precision, and of results.
    """

    stretch: int
    square: bool
    stored: torch.dtype
    rest: torch.dtype

    def input(self, x: Tensor) -> Operand:
        """In E4M3, with the scales of its rows."""
        return self._rows(x)

    def weight(self, w: Tensor, scale: Tensor | None = None) -> Operand:
        """In E4M3 with the scales of its squares; else itself, to be cut along either dim.

        Args:
            w: this rank's part, [n_out, n_in].
            scale: of the forward pass, one for each square; None where this is the forward pass.
        """
        if not self.square:
            return Operand(w)
        if scale is None:
            scale = self._scale(square_amax(w, self.stretch))
        shape, size = w.shape, self.stretch
        return Operand(rounded(w.to(self._wide) / spread(scale, shape, size), E4M3), scale)

    def gradient(self, g: Tensor) -> Gradient:
        """In E4M3, once along the outputs and once along the tokens, [n_out, tokens]."""
        return Gradient(self._rows(g), self._rows(g.t()))

    def forward(self, x: Operand, w: Operand) -> Tensor:
        """Compute x w^T: [..., n_in] to [..., n_out].

        Args:
            x: E4M3 [..., n_in], with the scales of its rows [..., n_in / stretch].
            w: [n_out, n_in], as `weight` gave it.

        Raises:
            ValueError: x has no scales.
        """
        return unfolded(self._multiply(self._meant(x).flatten(0, -2), self._matrix(w)), x.data)

    def input_gradient(self, g: Operand, w: Operand) -> Tensor:
        """Compute g w: [tokens, n_in].

        Args:
            g: E4M3 [tokens, n_out], with the scales of its rows [tokens, n_out / stretch].
            w: [n_out, n_in], as `weight` gave it.

        Raises:
            ValueError: g has no scales.
        """
        matrix = self._matrix(w).t() if self.square else self._matrix(Operand(w.data.t()))
        return self._multiply(self._meant(g), matrix)

    def weight_gradient(self, g: Operand, x: Operand) -> Tensor:
        """Compute g^T x, both cut along tokens: [n_out, n_in].

        Args:
            g: E4M3 [n_out, tokens], with the scales of its rows [n_out, tokens / stretch].
            x: E4M3 [..., n_in], with the scales of its rows; cut anew here.

        Raises:
            ValueError: one of them has no scales.
        """
        tokens = self._meant(x).flatten(0, -2).t()
        return self._multiply(self._meant(g), self._meant(self._rows(tokens)))

    @property
    def _wide(self) -> torch.dtype:
        return wide_of(self.rest)

    def _rows(self, x: Tensor) -> Operand:
        scale = self._scale(row_amax(x, self.stretch))
        data = rounded(x.to(self._wide) / spread_rows(scale, x.shape[-1], self.stretch), E4M3)
        return Operand(data, scale)

    def _scale(self, amax: Tensor) -> Tensor:
        return power_of_two_scale(amax.float(), E4M3.largest).to(self.stored)

    def _meant(self, operand: Operand) -> Tensor:
        """The numbers that rows stand for."""
        data, scale = operand
        if scale is None:
            raise ValueError("rows in low precision have scales")
        return data.to(self._wide) * spread_rows(scale, data.shape[-1], self.stretch)

    def _matrix(self, operand: Operand) -> Tensor:
        """The numbers that a matrix stands for; one without scales is rounded along its rows."""
        data, scale = operand
        if scale is None:
            return self._meant(self._rows(data))
        return data.to(self._wide) * spread(scale, data.shape, self.stretch)

    def _multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Add up the products of 128 values at a time: [m, k] and [n, k] to [m, n]."""
        total = torch.zeros(len(a), len(b), dtype=self._wide, device=a.device)
        for x, y in zip(a.split(_PROMOTED, -1), b.split(_PROMOTED, -1), strict=True):
            total.addmm_(x, y.t())
        return total.to(self.rest)


_PROMOTED = 128  # products added up before the sum is put into fp32


def row_amax(x: Tensor, stretch: int) -> Tensor:
    """The largest magnitude of each stretch of a row: [..., n] to [..., n / stretch], rounded up.

    Args:
        x: 16 bits or wider; the result has its dtype.
        stretch: values in one; the last of a row may be shorter.
    """
    padded = F.pad(x, (0, -x.shape[-1] % stretch))
    return padded.view(*x.shape[:-1], -1, stretch).abs().amax(-1)


def square_amax(w: Tensor, size: int) -> Tensor:
    """The largest magnitude of each square: [n, m] to [n / size, m / size], both rounded up.

    Args:
        w: 16 bits or wider; the result has its dtype.
        size: rows and columns of a square; the last ones may be smaller.
    """
    return row_amax(row_amax(w, size).t(), size).t()


def spread_rows(scale: Tensor, n: int, stretch: int) -> Tensor:
    """Give each value the scale of its stretch: [..., n / stretch], rounded up, to [..., n].

    Args:
        scale: fp32 or wider, which the result has too; or E8M0, which becomes fp32.
        n: values of a row.
        stretch: values that share a scale.
    """
    return wider(scale).repeat_interleave(stretch, -1)[..., :n]


def spread(scale: Tensor, shape: torch.Size, size: int) -> Tensor:
    """Give each value the scale of its square: [n / size, m / size], rounded up, to [n, m].

    Args:
        scale: fp32 or wider, which the result has too; or E8M0, which becomes fp32.
        shape: n and m.
        size: rows and columns of a square.
    """
    return spread_rows(spread_rows(scale, shape[1], size).t(), shape[0], size).t()


def wider(scale: Tensor) -> Tensor:
    """A scale that numbers can be multiplied with; E8M0 is for keeping only."""
    return scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
