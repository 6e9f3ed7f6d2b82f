"""Reads which kinds of published runs the rates were fitted on, and how far off they were.

The file is written by `benchmarks/published/fit.py`.
"""

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PATH = Path(__file__).parent / "evidence.toml"


@dataclass(frozen=True)
class Evidence:
    """The rows of one kind.

    Attributes:
        family: name of the set of rates.
        bits: of the operands of products, 16, 8 or 4.
        mixture: of experts.
        program: name of the framework profile.
        rows: how many.
        spread: standard deviation of ln(predicted / published), each row without its source.
    """

    family: str
    bits: int
    mixture: bool
    program: str
    rows: int
    spread: float


@dataclass(frozen=True)
class AllEvidence:
    """All kinds, and what holds over them.

    Attributes:
        all: spread over all rows, each without its source.
        unseen: what a kind that was left out of the fit adds.
        open: what a row adds that leaves its layout open.
        most_devices: of a row.
        kinds: those that the fit has seen.
    """

    all: float
    unseen: float
    open: float
    most_devices: int
    kinds: tuple[Evidence, ...]

    def of_family(self, name: str) -> list[Evidence]:
        """The kinds on one set of rates."""
        return [kind for kind in self.kinds if kind.family == name]


@lru_cache(maxsize=1)
def evidence() -> AllEvidence:
    """What the fit has seen."""
    with PATH.open("rb") as file:
        table = tomllib.load(file)
    kinds = tuple(Evidence(**kind) for kind in table.pop("kind"))
    return AllEvidence(kinds=kinds, **table)
