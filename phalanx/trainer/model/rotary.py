"""Rotary positions: angles by position, perhaps stretched, and the turning of queries and keys.

Symbols: d channels that are turned, theta base of the wavelengths, s sequence length.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from phalanx.core.model import ModelShape
from phalanx.core.rope import RopeScaling
from phalanx.trainer.ops.autograd import apply


def rotary_angles(
    shape: ModelShape, positions: Tensor, dtype: torch.dtype, seq: int, *, local: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al. 2021, arXiv:2104.09864).

    Args:
        shape: gives the number of rotated channels d, the base theta, and what is stretched.
        positions: int64 [s, b].
        dtype: of the activations that will be rotated.
        seq: s of the whole sequence, by which a dynamic scaling goes.
        local: of a layer with a window, which has a base of its own in some models.

    Returns:
        Two [s, b, 1, d/2], computed in at least fp32.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rates, factor = rotary_rates(shape, wide, positions.device, seq, local=local)
    angles = positions.to(wide)[..., None, None] * rates
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotary_rates(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, seq: int, *, local: bool = False
) -> tuple[Tensor, float]:
    """Radians per position of each pair of channels, and a factor on cosines and sines.

    Args:
        shape: gives d, theta and the scaling.
        dtype: to compute in.
        device: of the result.
        seq: s of the whole sequence.
        local: of a layer with a window; a base of its own is never stretched.

    Returns:
        [d/2], and the factor.
    """
    d, own = shape.rotary_dim, local and shape.local_theta > 0
    theta = shape.local_theta if own else shape.rope_theta
    scaling = RopeScaling() if own else shape.rope
    powers = torch.arange(0, d, 2, dtype=dtype, device=device) / d
    match scaling.kind:
        case "linear":
            return theta**-powers / scaling.factor, 1.0
        case "dynamic":  # "NTK-aware": the base grows with the sequence
            longer = scaling.factor * max(seq, scaling.original) / scaling.original
            grown = theta * (longer - (scaling.factor - 1)) ** (d / (d - 2))
            return grown**-powers, 1.0
        case "llama3":
            return _llama3(theta**-powers, scaling), 1.0
        case "yarn":
            return _yarn(theta**-powers, theta, scaling), _yarn_factor(scaling)
    return theta**-powers, 1.0


def _llama3(rates: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched, short ones are not, and those between a little.

    Source: Llama 3.1, github.com/meta-llama/llama-models, models/llama3/model.py.
    """
    turns = scaling.original * rates / (2 * math.pi)
    share = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return rates * share + rates / scaling.factor * (1 - share)


def _yarn(rates: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), equations 17 to 22."""
    d = 2 * len(rates)

    def channel(turns: float) -> float:
        return d * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.fast), channel(scaling.slow)
    if scaling.rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    high = high + 0.001 if low == high else high
    places = torch.arange(len(rates), dtype=rates.dtype, device=rates.device)
    stretched = ((places - low) / (high - low)).clamp(0, 1)
    return rates / scaling.factor * stretched + rates * (1 - stretched)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention:
        return scaling.attention
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the last d channels of [s, b, a, n] in pairs (x_i, x_{i + d/2}) by position.

    Args:
        x: queries or keys; the channels before the last d stay as they are.
        angles: cosines and sines, [s, b, 1, d/2] each, of the dtype of x.
    """
    return cast(Tensor, apply(_Rotate, x, *angles))


class _Rotate(torch.autograd.Function):
    """A rotation is linear: backward turns the gradient by the opposite angle and saves no x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        return _turn(grads[0], cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    still = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., still:].chunk(2, -1)
    if torch.compiler.is_compiling():  # fused there, and `out=` cannot be traced
        turned = (a * cos - sign * b * sin, b * cos + sign * a * sin)
        return torch.cat([x[..., :still], *turned], -1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., :still] = x[..., :still]
    left, right = out[..., still:].chunk(2, -1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=right).addcmul_(a, sin, value=sign)
    return out
