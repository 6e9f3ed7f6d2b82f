"""FP8 with one scale for each tensor: E4M3 forward, E5M2 for gradients.

Where the scale comes from tells two recipes apart. Delayed scaling reads it off the tensor's
largest values in past steps (`history.py`), current scaling off the tensor itself.
Source: Micikevicius et al. 2022 (arXiv:2209.05433), sections 3.1 and 4.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.precision.formats import E4M3, E5M2, Format, rounded
from phalanx.trainer.precision.multiply import Multiply, unfolded, wide_of
from phalanx.trainer.precision.product import Gradient, Operand

# The scale of a tensor, fp32 without dims, for a format; None where it is not to be rounded.
Scaling = Callable[[Tensor, Format], Tensor | None]


@dataclass(frozen=True)
class PerTensor:
    """One projection whose operands have one scale each.

    Attributes:
        of_input, of_weight, of_gradient: where their scales come from.
        multiply: emulated or native.
    """

    of_input: Scaling
    of_weight: Scaling
    of_gradient: Scaling
    multiply: Multiply

    def input(self, x: Tensor) -> Operand:
        """In E4M3: a byte for each element travels and is kept."""
        return quantized(x, self.of_input(x, E4M3), E4M3)

    def weight(self, w: Tensor, scale: Tensor | None = None) -> Operand:
        """In E4M3, in backward with the scale of the forward pass.

        Args:
            w: this rank's part, [n_out, n_in].
            scale: of the forward pass, fp32 without dims; None to ask for one, which may give none.
        """
        return quantized(w, self.of_weight(w, E4M3) if scale is None else scale, E4M3)

    def gradient(self, g: Tensor) -> Gradient:
        """In E5M2, the same for both products."""
        operand = quantized(g, self.of_gradient(g, E5M2), E5M2)
        return Gradient(operand, operand)

    def forward(self, x: Operand, w: Operand) -> Tensor:
        """Compute x w^T: [..., n_in] to [..., n_out].

        Args:
            x: [..., n_in], E4M3 with its scale, or itself without one.
            w: [n_out, n_in], likewise.
        """
        rows = x._replace(data=x.data.flatten(0, -2))
        return unfolded(self.multiply(rows, w), x.data)

    def input_gradient(self, g: Operand, w: Operand) -> Tensor:
        """Compute g w: [tokens, n_in].

        Args:
            g: [tokens, n_out], E5M2 with its scale, or itself without one.
            w: [n_out, n_in], E4M3 likewise.
        """
        return self.multiply(g, w._replace(data=w.data.t()))

    def weight_gradient(self, g: Operand, x: Operand) -> Tensor:
        """Compute g^T x, over all tokens: [n_out, n_in].

        Args:
            g: [tokens, n_out], E5M2 with its scale, or itself without one.
            x: [..., n_in], E4M3 likewise.
        """
        columns = x._replace(data=x.data.flatten(0, -2).t())
        return self.multiply(g._replace(data=g.data.t()), columns)


def quantized(x: Tensor, scale: Tensor | None, to: Format) -> Operand:
    """A tensor in 8 bits, with its scale; itself without one.

    Args:
        x: of any shape, 16 bits or wider.
        scale: what the result is multiplied with to mean x; fp32, no dims.
        to: the format.
    """
    if scale is None:
        return Operand(x)
    return Operand(rounded(x.to(wide_of(x.dtype)) / scale, to), scale)


def scale_for(amax: Tensor, to: Format) -> Tensor:
    """The fp32 scale that makes the largest value the largest number of the format; 1 for zero.

    Args:
        amax: the largest magnitude of a tensor; of several, one scale each.
        to: the format.
    """
    return (amax.float() / to.largest).where(amax != 0, 1.0)


@dataclass(frozen=True)
class Current:
    """Scales a tensor by its own largest value, wherever its parts are.

    Attributes:
        groups: over which its parts are spread; none where this rank has all of it.
    """

    groups: Sequence[Group] = ()

    def __call__(self, x: Tensor, to: Format) -> Tensor:
        """The scale of the whole tensor, the same on every rank."""
        return scale_for(amax_of(x, self.groups), to)


def amax_of(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """The largest magnitude of a tensor that is cut over groups; fp32, no dims.

    All ranks of the groups call it together. Where any of them holds something that is not finite,
    it is not finite.

    Args:
        x: this rank's part, of any shape.
        groups: over which the parts are spread; none where this rank has all of it.
    """
    amax: Tensor = torch.linalg.vector_norm(x, torch.inf).float()
    for group in groups:
        amax = amax.nan_to_num(nan=torch.inf)  # a maximum of messages may lose a nan
        group.all_reduce(amax, "amax", largest=True).wait()
    return amax
