"""What utilisation is measured against: the data sheet of a known GPU, the speed of this CPU."""

import time

import torch

from phalanx.catalog import load
from phalanx.core.errors import RefusedError
from phalanx.core.precision import Precision
from phalanx.trainer.ops.kernels import times

SIDE = 1024  # large enough for full speed, small enough for many products in the time


def known_peak(device_name: str, precision: Precision) -> float | None:
    """Dense FLOP/s of one accelerator, from the catalog; None if it, or its peak, is unknown.

    Args:
        device_name: as `torch.cuda.get_device_name` says it.
        precision: of a layout.
    """
    device = load.accelerator_by_device(device_name)
    if device is None:
        return None
    try:
        return device.peak(precision.matrix_format)
    except RefusedError:
        return None


def measured_gemm_flops(dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP/s of square matrix products on the threads of this rank, as training computes them.

    Ranks that share cores must measure at the same moment (call a barrier first): the sum over
    them is then what the machine can do. The mean over the whole time is taken, not the best
    product, which would count a core twice whenever the other ranks rest.

    Args:
        dtype: of the matrices.
        seconds: how long to measure; as much again is spent on warming up, at most.

    Returns:
        2 n^3 FLOP per product of n x n matrices, over the time they took.
    """
    a = torch.randn(SIDE, SIDE).to(dtype)
    b = torch.randn(SIDE, SIDE).to(dtype)
    _multiply_for(seconds / 2, a, b)
    products, elapsed = _multiply_for(seconds, a, b)
    return products * 2 * SIDE**3 / elapsed


def _multiply_for(seconds: float, a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    products, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        times(a, b)
        products += 1
    return products, elapsed
