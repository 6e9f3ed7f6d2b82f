"""How rotary positions are stretched beyond the length that a model was first trained on.

One line, as in a run file: `llama3 factor=32 low=1 high=4 original=8192`. What each kind does is in
`trainer/model/rotary.py`.
"""

from dataclasses import dataclass, fields
from math import inf
from typing import Any

from phalanx.core.errors import UsageError, unknown

KINDS = ("linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A kind of scaling and its numbers.

    Example:
        >>> RopeScaling.parse("linear factor=4").factor
        4.0
        >>> str(RopeScaling.parse("llama3 high=4 factor=8 original=8192"))
        'llama3 factor=8 original=8192'

    Attributes:
        kind: linear, dynamic (NTK), llama3, yarn; empty scales nothing.
        factor: how much longer sequences are than `original`.
        original: tokens of the sequences of the first training.
        low, high: of llama3, wavelengths above original/low are stretched, below original/high not.
        fast, slow: of yarn, turns within `original` above which nothing is stretched, and below
            which all is.
        attention: of yarn, factor on cosines and sines; 0 means 0.1 ln(factor) + 1.
        rounded: of yarn, 1 where the borders between the three are whole channels.
    """

    kind: str = ""
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention: float = 0.0
    rounded: int = 1

    @classmethod
    def parse(cls, line: str) -> "RopeScaling":
        """Read a line.

        Raises:
            UsageError: an unknown kind or key, or a number that is none or out of range.
        """
        kind, *words = line.split() or [""]
        if not kind:
            return cls()
        if kind not in KINDS:
            raise unknown("kind of model.rope_scaling", kind, KINDS)
        known = [field.name for field in fields(cls) if field.name != "kind"]
        values: dict[str, Any] = {}
        for word in words:
            key, _, text = word.partition("=")
            if key not in known:
                raise unknown("key of model.rope_scaling", key, known)
            try:
                number = float(text)
                values[key] = int(number) if key in ("original", "rounded") else number
            except ValueError:
                raise UsageError(f"model.rope_scaling has {word!r}; write {key}=NUMBER") from None
        return cls(kind=kind, **values).checked()

    def checked(self) -> "RopeScaling":
        """The same.

        Raises:
            UsageError: a number is out of range.
        """
        if not 0 < self.factor < inf:
            raise UsageError(f"model.rope_scaling has factor={self.factor}; it is above 0")
        if self.kind in ("dynamic", "llama3", "yarn") and self.original < 1:
            raise UsageError(
                f"model.rope_scaling {self.kind} needs original=TOKENS, the length of the "
                "sequences that the model was first trained on"
            )
        if self.kind == "llama3" and not 0 < self.low < self.high:
            raise UsageError(f"model.rope_scaling has low={self.low} high={self.high}; low is less")
        return self

    def __str__(self) -> str:
        plain = RopeScaling()
        words = [self.kind]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "kind" and value != getattr(plain, field.name):
                words.append(f"{field.name}={value:g}" if value < 1e6 else f"{field.name}={value}")
        return " ".join(words)
