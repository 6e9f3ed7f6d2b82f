"""Two operands multiplied: by the device's own kernels where it has them, else by exact emulation.

A product of two 8-bit numbers is exact in fp32, so that emulation means: multiply the numbers
that the operands stand for, and add up in fp32. In a run whose other numbers are fp64, sums are
fp64 too.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from phalanx.trainer.ops.kernels import times
from phalanx.trainer.precision.product import Operand

Multiply = Callable[[Operand, Operand], Tensor]  # [m, k] and [n, k] to [m, n]

_ALIGNMENT = 16  # elements: what the kernels of cuBLASLt ask of both dims of 8-bit matrices
_ADA = (8, 9)  # the first capability with 8-bit products


def has_native_products(device: torch.device) -> bool:
    """Whether the device multiplies 8-bit numbers by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _ADA


def emulated(rest: torch.dtype) -> Multiply:
    """Multiply tensors with one scale each, as the definition says.

    Args:
        rest: dtype of everything that is not in low precision, and of the result.
    """
    wide = wide_of(rest)

    def multiply(a: Operand, b: Operand) -> Tensor:
        y = times(a.data.to(wide), b.data.to(wide))
        for operand in (a, b):
            if operand.scale is not None:
                y *= operand.scale
        return y.to(rest)

    return multiply


def native(rest: torch.dtype) -> Multiply:
    """Multiply tensors with one scale each by `torch._scaled_mm`, where its kernels can.

    They want dims that are multiples of 16, and one of two E5M2 operands to be E4M3; both hold
    for the products of a projection whose sizes are even enough. Others are emulated.
    """
    otherwise = emulated(rest)

    def multiply(a: Operand, b: Operand) -> Tensor:
        sizes = (*a.data.shape, *b.data.shape)
        if a.scale is None or b.scale is None or any(size % _ALIGNMENT for size in sizes):
            return otherwise(a, b)
        return torch._scaled_mm(
            a.data.contiguous(),
            b.data.contiguous().t(),
            scale_a=a.scale,
            scale_b=b.scale,
            out_dtype=rest,
        )

    return multiply


def unfolded(y: Tensor, like: Tensor) -> Tensor:
    """Give the rows of a fresh y the leading dims of `like`; not a view, so that sums can go in.

    Args:
        y: [rows, n]; its memory is the result's, so nothing else may hold it.
        like: [..., k], with as many rows.
    """
    return cast(Tensor, torch.ops.aten._unsafe_view(y, [*like.shape[:-1], y.shape[-1]]))


def wide_of(rest: torch.dtype) -> torch.dtype:
    """Where sums of products are kept: fp32, or fp64 in an fp64 run."""
    return torch.float64 if rest == torch.float64 else torch.float32
