"""Which whole numbers a schedule takes: for its ranks, its micro-batches, its chunks."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """The multiples of a number from some number on, perhaps up to another one.

    Example:
        >>> str(Sizes(least=8, multiple=2)), Sizes(least=8, multiple=2).nearest(11)
        ('even and at least 8', '10 or 12')

    Attributes:
        least: none is smaller; itself a multiple.
        multiple: what divides all of them.
        most: none is larger; None where there is no end.
    """

    least: int = 1
    multiple: int = 1
    most: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether there is a single one."""
        return self.least == self.most

    def hold(self, n: int) -> bool:
        """Whether `n` is one of them."""
        return self.fewest(n) == n

    def fewest(self, n: int) -> int:
        """The smallest of them that is at least `n`; the largest where all are smaller."""
        size = max(-(-n // self.multiple) * self.multiple, self.least)
        return size if self.most is None else min(size, self.most)

    def nearest(self, n: int) -> str:
        """The closest below and above a number that is none of them, in words."""
        below = min(n // self.multiple * self.multiple, self.fewest(n))
        found = {below, self.fewest(n)} if below >= self.least else {self.fewest(n)}
        return " or ".join(str(size) for size in sorted(found))

    def __str__(self) -> str:
        """What a number has to be: `a multiple of 4`, `even and at least 8`."""
        if self.fixed:
            return str(self.least)
        words = {1: "", 2: "even"}.get(self.multiple, f"a multiple of {self.multiple}")
        if self.least > self.multiple or not words:
            words += f"{' and ' if words else ''}at least {self.least}"
        return words + (f" and at most {self.most}" if self.most is not None else "")


ANY = Sizes()
ONE = Sizes(most=1)
TWO = Sizes(least=2, most=2)
SEVERAL = Sizes(least=2)


def any_number(p: int) -> Sizes:
    """Micro-batches of a schedule that takes any number of them on `p` ranks."""
    return ANY
