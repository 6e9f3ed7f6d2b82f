"""The kernels of a run's profiled steps, by time and by what they are for."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "kernels.json"  # as the trainer writes it


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kind of kernel in a step of rank 0.

    Attributes:
        name: as torch has it.
        kind: what it is for.
        times: in a step.
        seconds: of a step, without the kernels inside it.
        share: of all kernels.
    """

    name: str
    kind: str
    times: float
    seconds: float
    share: float

    def to_dict(self) -> dict[str, Any]:
        """One row of the document."""
        return dict(vars(self))


def read_kernels(folder: Path, notes: list[str]) -> tuple[Kernel, ...]:
    """The kernels that a run has profiled, longest first; none where it has not.

    Args:
        folder: of the run.
        notes: told what cannot be read.
    """
    try:
        rows = json.loads((folder / FILE).read_text(encoding="utf-8"))["kernels"]
        found = [_row(row) for row in rows]
        whole = math.fsum(seconds for _, _, _, seconds in found)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        notes.append(f"{FILE} cannot be read ({type(error).__name__})")
        return ()
    kernels = (
        Kernel(name=name, kind=kind, times=times, seconds=seconds, share=seconds / (whole or 1.0))
        for name, kind, times, seconds in found
    )
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))


def _row(row: Mapping[str, Any]) -> tuple[str, str, float, float]:
    times, seconds = float(row["times"]), float(row["seconds"])
    if not (math.isfinite(times) and math.isfinite(seconds)):
        raise ValueError("not a number")
    return str(row["name"]), str(row["kind"]), times, seconds


def by_kind(kernels: tuple[Kernel, ...]) -> dict[str, float]:
    """Seconds of a step by what kernels are for, longest first.

    Args:
        kernels: of a run.
    """
    sums: dict[str, float] = {}
    for kernel in kernels:
        sums[kernel.kind] = sums.get(kernel.kind, 0.0) + kernel.seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
