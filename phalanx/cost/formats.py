"""Number formats of training: range, resolution, and what their bits cannot hold."""

from dataclasses import dataclass

from phalanx.core.errors import unknown


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format, by the widths of its fields.

    Attributes:
        name: lower-case name.
        exponent: bits.
        fraction: bits.
        finite: the top exponent holds numbers too (E4M3: only one pattern is NaN, none infinite).
    """

    name: str
    exponent: int
    fraction: int
    finite: bool = False

    @property
    def bytes(self) -> float:
        """Size of one number; 4-bit formats share a byte."""
        return (1 + self.exponent + self.fraction) / 8

    @property
    def largest(self) -> float:
        """The largest number."""
        bias = 2.0 ** (self.exponent - 1) - 1
        if self.finite:
            return float((2.0 - 2.0 * 2.0**-self.fraction) * 2.0 ** (bias + 1))
        return float((2.0 - 2.0**-self.fraction) * 2.0**bias)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full resolution."""
        return float(2.0 ** (2.0 - 2.0 ** (self.exponent - 1)))

    @property
    def smallest(self) -> float:
        """The smallest subnormal number; half of it and less becomes zero."""
        return self.smallest_normal * 2.0**-self.fraction

    @property
    def spacing(self) -> float:
        """Distance of neighbouring numbers near 1."""
        return 2.0**-self.fraction

    @property
    def lost_update(self) -> float:
        """An addend below this share of a number may be rounded away: half the spacing.

        Why weights keep an fp32 master copy: Micikevicius et al. 2017 (arXiv:1710.03740),
        section 3.1.
        """
        return self.spacing / 2


FORMATS = (
    NumberFormat("fp64", 11, 52),
    NumberFormat("fp32", 8, 23),
    NumberFormat("fp16", 5, 10),
    NumberFormat("bf16", 8, 7),
    NumberFormat("fp8-e4m3", 4, 3, finite=True),
    NumberFormat("fp8-e5m2", 5, 2),
)


def number_format(name: str) -> NumberFormat:
    """The format of this name.

    Sources: Kalamkar et al. 2019 (arXiv:1905.12322), table 1; Micikevicius et al. 2022
    (arXiv:2209.05433), table 1.

    Raises:
        UsageError: an unknown name.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    raise unknown("number format", name, [f.name for f in FORMATS])
