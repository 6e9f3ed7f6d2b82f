"""Formulas of the books and papers that the worked numbers need and no command does.

What a command or the page uses is in `phalanx/cost/`; these stand beside the tests that hold them
against their sources.
"""

from math import sqrt

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.cost.activations import paper_layer_bytes
from phalanx.schedules.layouts import chunks


def young_interval(write: float, between: float) -> float:
    """Seconds between checkpoints that lose least, sqrt(2 δ M).

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval".
    """
    return sqrt(2 * write * between)


def device_hours_lost(devices: int, seconds: float) -> float:
    """Device-hours in which a job of this size stood still for so long."""
    return devices * seconds / 3600


def paper_first_stage_bytes(shape: ModelShape, layout: Layout, seq: int) -> float:
    """Bytes that the blocks of the first pipeline rank keep at the peak of 1F1B.

    p micro-batches of L/p blocks: as much as one micro-batch through all L blocks. Interleaving
    in v chunks keeps (1 + (p - 1) / (p v)) times as much. Source: Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.2.3, equation 5.
    """
    p, v = layout.pp, chunks(layout)
    more = 1 + (p - 1) / (p * v) if v > 1 else 1.0
    return shape.layers * paper_layer_bytes(shape, layout, seq) * more


def elements_moved(zero: int, *, reshard: bool = True) -> float:
    """Elements that cross the data axis in a step, per parameter, for large d.

        zero 0, 1, 2    2    reduce-scatter of gradients, all-gather of weights (or all-reduce)
        zero 3          3    a second all-gather in backward, since the first was freed
        zero 3, kept    2    weights stay gathered between forward and backward

    Sources: Rajbhandari et al. 2019 (arXiv:1910.02054), section 7; Llama 3 keeps the weights
    (arXiv:2407.21783, section 3.3.2).
    """
    return 3.0 if zero == 3 and reshard else 2.0
