"""What failures and checkpoints cost: how much of the wall clock is training.

Symbols: δ seconds that a checkpoint stops training, τ seconds between checkpoints, M mean seconds
between failures of the whole job, R seconds to restart.
"""

from math import exp, expm1, inf, sqrt
from typing import NamedTuple

from phalanx.core.errors import UsageError


class Faults(NamedTuple):
    """How often the job stops, and how long it takes to go on."""

    between: float  # M, seconds
    restart: float  # R, seconds from the failure to the first new step


def checkpoint_bytes(params: float, bytes_per_param: float = 12.0) -> float:
    """Bytes of one checkpoint: 12 per parameter (fp32 master and two moments).

    Args:
        params: of the whole model.
        bytes_per_param: 14 with the bf16 weights beside them; 16 is the whole training state of
            mixed precision.
    """
    return params * bytes_per_param


def write_seconds(size: float, bandwidth: float) -> float:
    """Seconds to write a checkpoint, all ranks together.

    Args:
        size: bytes of the checkpoint.
        bandwidth: bytes/s of the storage.
    """
    return size / bandwidth


def between_failures(devices: int, observed_devices: int, observed: float) -> float:
    """M of a job of another size: failures are as many per device, so M falls as 1/devices.

    Args:
        devices: of this job.
        observed_devices: of the job that was watched.
        observed: its mean seconds between failures.
    """
    return observed * observed_devices / devices


def daly_interval(write: float, between: float) -> float:
    """τ, seconds of training between two checkpoints that waste the least.

        sqrt(2 δ M) (1 + sqrt(δ / 2M) / 3 + (δ / 2M) / 9) - δ    for δ < 2 M, else M

    A shorter one stops training for checkpoints, a longer one loses more with every failure.
    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", equation 37.

    Args:
        write: δ, seconds that training stands still for a checkpoint.
        between: M, seconds between failures of the whole job.

    Example:
        >>> round(daly_interval(write=30, between=10_000))
        755
    """
    if write >= 2 * between:
        return between
    ratio = write / (2 * between)
    return sqrt(2 * write * between) * (1 + sqrt(ratio) / 3 + ratio / 9) - write


def effective_share(interval: float, write: float, faults: Faults) -> float:
    """Share of the wall clock that becomes training, with failures at random.

        τ / [ M exp(R/M) (exp((τ + δ)/M) - 1) ]

    To first order 1 - δ/τ - (τ/2 + R)/M: checkpoints, half an interval lost per failure,
    restarts. Source: Daly 2006, equation 20.

    Args:
        interval: τ.
        write: δ, seconds that training stands still; only the copy where writing is asynchronous.
        faults: M and R; M may be infinite.

    Raises:
        UsageError: an interval that is not positive.

    Example:
        >>> round(effective_share(755, write=30, faults=Faults(between=10_000, restart=600)), 3)
        0.871
    """
    if not interval > 0:
        raise UsageError(f"an interval of {interval} s between checkpoints; it must be positive")
    if faults.between == inf:
        return interval / (interval + write)
    M, R = faults.between, faults.restart
    exponent = (interval + write) / M
    if exponent + R / M > 700:  # exp overflows: no interval is ever finished
        return 0.0
    return interval / (M * exp(R / M) * expm1(exponent))


def lost_per_failure(interval: float, restart: float) -> float:
    """Expected seconds that one failure costs: half an interval of work, and the restart.

    Args:
        interval: τ, seconds.
        restart: R, seconds.
    """
    return interval / 2 + restart
