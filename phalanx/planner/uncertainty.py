"""How far off an estimate may be, and why: what published runs of its kind have shown.

A kind is an accelerator family, the bits of products, a mixture or none, and a program. Of a kind
that the fit has seen, the spread is that of its rows, each predicted without its own source. Of
another, it is what rows of one kind show that are predicted without that kind, once for each
property that no row of the family has.
"""

import math
from typing import NamedTuple

from phalanx.catalog.evidence import AllEvidence, Evidence, evidence
from phalanx.core.layout import Layout
from phalanx.core.precision import Precision
from phalanx.planner.workload import Workload

_BITS = {"fp8": 8, "fp4": 4}


class Uncertainty(NamedTuple):
    """Spread of an estimate.

    Attributes:
        spread: standard deviation of ln(measured / predicted).
        reason: what it rests on, in one line.
    """

    spread: float
    reason: str


def bits(precision: Precision) -> int:
    """Of the operands of products: 16, 8 or 4; wider formats count as 16."""
    return _BITS.get(precision.matrix_format, 16)


def uncertainty(workload: Workload, layout: Layout) -> Uncertainty:
    """The spread of one estimate.

    Args:
        workload: the model, the devices and the program.
        layout: of it the devices, and what their count is to those of the fit.
    """
    found, rates = evidence(), workload.rates
    family = found.of_family(rates.name)
    device = workload.cluster.accelerator.name
    if workload.cluster.accelerator.sustained:
        return Uncertainty(rates.spread, f"rates that were measured on these devices: {rates.name}")
    if not family:
        reason = f"no published run on {device}, whose rates are {rates.name}"
        return Uncertainty(max(rates.spread, found.unseen), reason)
    kind = (bits(layout.precision), workload.shape.is_moe, workload.framework.name)
    for cell in family:
        if (cell.bits, cell.mixture, cell.program) == kind:
            return _beyond(Uncertainty(cell.spread, _seen(cell, rates.name)), found, layout.ranks)
    missing = _missing(family, kind)
    spread = math.hypot(found.all, found.unseen * math.sqrt(len(missing)))
    reason = f"all runs of the fit, since none on {rates.name} shows {' or '.join(missing)}"
    return _beyond(Uncertainty(spread, reason), found, layout.ranks)


def _missing(family: list[Evidence], kind: tuple[int, bool, str]) -> list[str]:
    """Properties that no row of a family has; or that none has together."""
    size, mixture, program = kind
    names = {True: "a mixture of experts", False: "a dense model"}
    alone = [
        (f"products in {size} bits", any(cell.bits == size for cell in family)),
        (names[mixture], any(cell.mixture == mixture for cell in family)),
        (f"the program {program}", any(cell.program == program for cell in family)),
    ]
    missing = [name for name, seen in alone if not seen]
    return missing or [f"{names[mixture]} in {size} bits by {program} together"]


def _seen(cell: Evidence, family: str) -> str:
    kind = "mixtures" if cell.mixture else "dense models"
    return (
        f"{cell.rows} runs of the fit on {family}: {kind}, {cell.bits} bits, {cell.program}; each "
        "predicted without its source"
    )


def _beyond(found: Uncertainty, shown: AllEvidence, ranks: int) -> Uncertainty:
    """More devices than any run of the fit had: rows show what each doubling is worth."""
    if ranks <= shown.most_devices:
        return found
    doublings = math.log2(ranks / shown.most_devices)
    spread = math.hypot(found.spread, shown.all * doublings / 2)
    return Uncertainty(spread, f"{found.reason}; none has over {shown.most_devices:,} devices")
