"""Low precision: what operands take in memory and on the way, and what it refuses.

What ranks tell each other about the scales is in `cost/messages/precision.py`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from phalanx.core.errors import UsageError
from phalanx.core.precision import STRETCH, Precision
from phalanx.cost.saved import Saved

_BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4)}
_SCALE_BYTES = {"fp8-block": 4, "mxfp8": 1}


class OperandBytes(NamedTuple):
    """Bytes per token of an input, as a product keeps and gathers it.

    Attributes:
        data: of the numbers.
        scales: beside them, in recipes that scale parts of a row.
    """

    data: int
    scales: int = 0


def element_bytes(precision: Precision) -> tuple[int, int]:
    """Bytes of an element of activations, and where gradients are accumulated and reduced.

    Raises:
        UsageError: the precision is "auto", which only a device can resolve.
    """
    if precision.rest not in _BYTES:
        raise UsageError(f"name the precision to count bytes: {', '.join(sorted(_BYTES))}")
    return _BYTES[precision.rest]


def operand_bytes(precision: Precision, width: int) -> OperandBytes:
    """What a projection's input of `width` channels takes per token, and its scales.

    NVFP4 is emulated: its inputs stay in the format of the rest.

    Args:
        precision: without a recipe, an input takes what the rest takes.
        width: channels of the input, as many as share a row of scales.

    Raises:
        UsageError: the precision is "auto", which only a device can resolve.

    Example:
        >>> operand_bytes(Precision.parse("mxfp8"), 4096)
        OperandBytes(data=4096, scales=128)
    """
    recipe, element = precision.recipe, element_bytes(precision)[0]
    if recipe in ("", "nvfp4"):
        return OperandBytes(width * element)
    if recipe in _SCALE_BYTES:
        return OperandBytes(width, -(-width // STRETCH[recipe]) * _SCALE_BYTES[recipe])
    return OperandBytes(width)


def as_operands(saved: Iterable[Saved], precision: Precision) -> Iterator[Saved]:
    """What a block keeps, once it keeps inputs of products as they multiply.

    The attention result is read by attention too, so it is kept in both formats, unless attention
    is computed again.

    Args:
        saved: bytes per token as activations, of any operators.
        precision: with a recipe.

    Raises:
        UsageError: the precision is "auto", which only a device can resolve.
    """
    element = element_bytes(precision)[0]
    for item in saved:
        operand = sum(operand_bytes(precision, round(item.bytes / element)))
        if item.read_by == "both" and operand != item.bytes:
            by_core = item.freed_by | {"core"}
            yield item._replace(name="softmax times values", freed_by=by_core)
            yield item._replace(bytes=operand)
        elif item.read_by == "product":
            yield item._replace(bytes=operand)
        else:
            yield item
