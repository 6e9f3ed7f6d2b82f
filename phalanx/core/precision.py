"""What `precision=` in a layout means: the format of products, and that of everything else.

A low-precision recipe names the products of the blocks' projections alone; the rest of the model
stays in bf16, or in what stands behind a plus: `fp8-block+fp64`. With fp64 the oracle is sharp.
"""

from dataclasses import dataclass

from phalanx.core.errors import UsageError

PLAIN = ("fp32", "bf16", "fp64", "fp16")
SCALED = ("fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4")
BESIDE = ("bf16", "fp32", "fp64")  # what can stand behind the plus

# values along a product's inner dim that share a scale; 0 means the whole tensor
STRETCH = {"fp8": 0, "fp8-current": 0, "fp8-block": 128, "mxfp8": 32, "nvfp4": 16}

# What the matrix units multiply, as the catalog of devices calls it.
_UNITS = {"fp8": "fp8", "fp8-current": "fp8", "fp8-block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


@dataclass(frozen=True)
class Precision:
    """The number formats of a step.

    Attributes:
        recipe: of products in low precision; empty where they have the format of the rest.
        rest: of weights, activations and all other arithmetic; "auto" until a device is known.

    Example:
        >>> Precision.parse("fp8").rest
        'bf16'
    """

    recipe: str = ""
    rest: str = "auto"

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """Read a format, a recipe, or a recipe with the format of the rest behind a plus.

        Raises:
            UsageError: a word that does not exist, or two that do not go together.
        """
        first, plus, second = text.lower().partition("+")
        if first in SCALED and (second in BESIDE or not plus):
            return cls(first, second or "bf16")
        if not plus and first in ("auto", *PLAIN):
            return cls("", first)
        known = ", ".join(("auto", *PLAIN, *SCALED))
        raise UsageError(
            f"precision={text}; precision can be {known}, and what is not in the products of "
            f"{SCALED[0]} and its like can be named as in {SCALED[0]}+{' or +'.join(BESIDE)}"
        )

    def __str__(self) -> str:
        """The word that `parse` reads."""
        if not self.recipe:
            return self.rest
        return self.recipe if self.rest == "bf16" else f"{self.recipe}+{self.rest}"

    @property
    def is_auto(self) -> bool:
        """Whether only a device can tell: bf16 on a GPU, fp32 on a CPU."""
        return self.rest == "auto"

    def on(self, default: str) -> "Precision":
        """The same, where auto means `default`."""
        return Precision(self.recipe, default) if self.is_auto else self

    @property
    def matrix_format(self) -> str:
        """The format of the matrix units that it needs: bf16, fp8, fp4, ..."""
        return _UNITS.get(self.recipe, self.rest)

    @property
    def reference(self) -> "Precision":
        """The same rounding of products with everything else in fp64, where the oracle is sharp."""
        return Precision(self.recipe, "fp64")


AUTO, BF16 = Precision(), Precision(rest="bf16")
