"""What `precision=` in a layout means: the format of products, and that of everything else.

A recipe of few bits names the products of the blocks' projections alone; the rest of the model
stays in bf16, or in what stands behind a plus: `fp8-block+fp64`. With fp64 the oracle is sharp.
"""

from typing import NamedTuple

from phalanx.core.errors import UsageError

PLAIN = ("fp32", "bf16", "fp64", "fp16")
SCALED = ("fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4")
BESIDE = ("bf16", "fp32", "fp64")  # what can stand behind the plus

# values along a product's inner dim that share a scale; 0 means the whole tensor
STRETCH = {"fp8": 0, "fp8-current": 0, "fp8-block": 128, "mxfp8": 32, "nvfp4": 16}


class Formats(NamedTuple):
    """A precision, taken apart.

    Attributes:
        recipe: of products in few bits; empty where they have the format of the rest.
        rest: of weights, activations and all other arithmetic; "auto" until a device is known.
    """

    recipe: str
    rest: str


# What the matrix units multiply, as the catalog of devices calls it.
_UNITS = {"fp8": "fp8", "fp8-current": "fp8", "fp8-block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


def formats(precision: str) -> Formats:
    """Take `precision` apart.

    Raises:
        UsageError: a word that does not exist, or two that do not go together.
    """
    first, plus, second = precision.partition("+")
    if first in SCALED and (second in BESIDE or not plus):
        return Formats(first, second or "bf16")
    if not plus and first in ("auto", *PLAIN):
        return Formats("", first)
    known = ", ".join(("auto", *PLAIN, *SCALED))
    raise UsageError(
        f"precision={precision}; precision can be {known}, and what is not in the products of "
        f"{SCALED[0]} and its like can be named as in {SCALED[0]}+{' or +'.join(BESIDE)}"
    )


def matrix_format(precision: str) -> str:
    """The format of the matrix units that a precision needs: bf16, fp8, fp4, ..."""
    recipe, rest = formats(precision)
    return _UNITS.get(recipe, rest)


def sharpened(precision: str) -> str:
    """The same rounding of products with everything else in fp64, where the oracle is sharp."""
    recipe = formats(precision).recipe
    return f"{recipe}+fp64" if recipe else "fp64"
