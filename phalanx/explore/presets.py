"""What the catalog gives the page: models and accelerators, and the facts that inputs follow."""

from functools import cache, lru_cache
from typing import NamedTuple

from phalanx.catalog import load
from phalanx.core.cluster import Accelerator
from phalanx.core.errors import RefusedError
from phalanx.core.layout import DEFAULT_SCHEDULE
from phalanx.core.model import ModelShape
from phalanx.cost.roofline import block_of
from phalanx.cost.state import (
    BOOK_ADAM,
    FULL_FP32_ADAM,
    MIXED_ADAM,
    MIXED_ADAM_FP32_GRADIENTS,
    StateBytes,
)
from phalanx.schedules.registry import NAMES

Facts = dict[str, float | int]
FORMAT = "bf16"


class StateRecipe(NamedTuple):
    """A way to keep training state: what stands on the page, and bytes by what they are for."""

    text: str
    bytes: StateBytes


STATES = {
    "16": StateRecipe("mixed precision Adam: 2 + 2 + 4 + 8", MIXED_ADAM),
    "10": StateRecipe("the scaling book: bf16 weights, fp32 moments", BOOK_ADAM),
    "12": StateRecipe(
        "weights and gradients in 16 bits, moments in fp32, no master copy",
        StateBytes(master=0.0),
    ),
    "16f": StateRecipe("everything in fp32", FULL_FP32_ADAM),
    "18": StateRecipe("mixed precision, gradients added in fp32", MIXED_ADAM_FP32_GRADIENTS),
}
RECIPES = tuple(STATES)
SCHEDULES = (DEFAULT_SCHEDULE, *(name for name in NAMES if name != DEFAULT_SCHEDULE))


def _first(name: str, names: list[str]) -> tuple[str, ...]:
    return (name, *(other for other in names if other != name))


@lru_cache(maxsize=1)
def accelerators() -> tuple[Accelerator, ...]:
    """Those whose bf16 peak is published."""
    return tuple(device for device in load.accelerators() if FORMAT in device.formats)


@lru_cache(maxsize=1)
def models() -> tuple[ModelShape, ...]:
    """Those of the catalog."""
    return tuple(entry.shape for entry in load.models())


ACCELERATORS = _first("h100-sxm", [device.name for device in accelerators()])
MODELS = _first("llama-3.1-405b", [shape.name for shape in models()])


@cache
def model_facts(name: str) -> Facts:
    """The sizes of a model, by the keys of the page; shared experts count in E and k.

    Args:
        name: in the catalog.
    """
    return facts_of(load.model(name))


def facts_of(shape: ModelShape) -> Facts:
    """The sizes of a shape, by the keys of the page; shared experts count in E and k.

    Args:
        shape: of the catalog, or of another.
    """
    block = block_of(shape)
    return {
        "D": block.h,
        "F": block.f,
        "L": shape.layers,
        "E": block.E,
        "k": block.k,
        "s": shape.shared_experts if shape.is_moe else 0,
        "heads": shape.heads,
    }


@cache
def chip_facts(name: str) -> Facts:
    """The rates of an accelerator, by the keys of the page.

    Args:
        name: in the catalog.
    """
    device = load.accelerator(name)
    both = 2 if device.domain.axes else 1  # links of one axis of a torus
    return {
        "C": device.peak(FORMAT),
        "W": both * device.domain.link.bandwidth or device.network.bandwidth,
        "Wn": device.network.bandwidth,
        "M": device.memory,
        "G": device.domain.size,
        "mdp": 2 if device.domain.axes > 1 else 1,
    }


def axes_of(name: str) -> int:
    """Torus axes of an accelerator; 0 for a switched fabric.

    Args:
        name: in the catalog.
    """
    return load.accelerator(name).domain.axes


def has_peak(device: Accelerator) -> bool:
    """Whether somebody published the peak that the page's clocks need."""
    try:
        return device.peak(FORMAT) > 0
    except RefusedError:
        return False
