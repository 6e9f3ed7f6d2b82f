"""Numbers of 8 and 4 bits: how a tensor is rounded to them, and what they can hold.

torch stores E4M3 and E5M2; E2M1 has no storage here, and its values stand in a wider type.
Sources: Micikevicius et al. 2022 (arXiv:2209.05433), table 1; the OCP Microscaling Formats
specification 1.0 (2023), section 5.3.3, for E2M1.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """A floating-point format that torch stores in one byte.

    Attributes:
        dtype: of torch.
        largest: number.
    """

    dtype: torch.dtype
    largest: float


E4M3 = Format(torch.float8_e4m3fn, 448.0)
E5M2 = Format(torch.float8_e5m2, 57344.0)
E2M1_LARGEST = 6.0


def rounded(x: Tensor, to: Format) -> Tensor:
    """The nearest numbers of a format, ties to even, of x as fp32 holds it.

    What is too large becomes the largest. What is not finite becomes nan, so that a step that
    overflowed is still skipped.

    Args:
        x: of any shape and float dtype.
        to: the format, whose dtype the result has.
    """
    x = x.float()
    return x.clamp(-to.largest, to.largest).where(x.isfinite(), torch.nan).to(to.dtype)


def rounded_to_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, ties to even, with the sign of x; fp32.

    What is too large becomes 6; what is not finite, nan.
    """
    x = x.float()
    size = x.abs()
    spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    nearest = ((x / spacing).round() * spacing).clamp(-E2M1_LARGEST, E2M1_LARGEST)
    return nearest.where(x.isfinite(), torch.nan)


def power_of_two_scale(largest: Tensor, limit: float) -> Tensor:
    """The smallest power of two s such that `largest` / s is at most `limit`; 1 for zero.

    So nothing saturates: Mishra et al. 2025 (arXiv:2506.08027), section 3, where the
    specification of 2023 would round down.

    Args:
        largest: magnitudes, one for each scale; fp32 or wider. Of nan the scale is nan.
        limit: the largest number of the format, above 0.
    """
    share, exponent = torch.frexp(largest / limit)
    exponent = exponent - (share == 0.5).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return scale.where(largest > 0, torch.where(largest == 0, 1.0, torch.nan).to(scale.dtype))
