"""Which activations backward computes again, as a layout's `recompute=` says it."""

import re
from dataclasses import dataclass

from phalanx.core.errors import UsageError

# What of a block can be computed again by itself. `core` is the attention core, which `selective`
# means (Korthikanti et al. 2022, arXiv:2205.05198, section 5); `operators` is every cheap operator
# and every second product, as selective checkpointing per operator does it.
PARTS = ("core", "norms", "mlp", "activation", "latent", "experts", "operators")
WORDS = ("none", "selective", "full", "full:2", "full:3", "...", *PARTS)


@dataclass(frozen=True)
class Recompute:
    """What is computed again: segments of whole blocks, or some parts of each block.

    Attributes:
        segment: blocks that are computed again together, from the input of the first, which alone
            is saved (Chen et al. 2016, arXiv:1604.06174); 0 computes no whole block again.
        parts: of each block, some of `PARTS`; none where whole blocks are computed again.

    Example:
        >>> str(Recompute.parse("mlp+norms"))
        'norms+mlp'
        >>> Recompute.parse("full:4").segment
        4
    """

    segment: int = 0
    parts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> "Recompute":
        """Read `none`, `selective`, `full`, `full:k`, or parts joined by a plus.

        Raises:
            UsageError: a word that does not exist.
        """
        words = text.lower()
        whole = re.fullmatch("full(?::([1-9][0-9]*))?", words)
        if whole:
            return cls(segment=int(whole[1] or 1))
        if words == "none":
            return cls()
        parts = frozenset(words.replace("selective", "core").split("+"))
        if not parts <= set(PARTS):
            raise UsageError(f"recompute={text}; recompute can be {', '.join(WORDS)}")
        return cls(parts=parts)

    def __str__(self) -> str:
        """The word that `parse` reads; parts in the order of `PARTS`."""
        if self.segment:
            return "full" if self.segment == 1 else f"full:{self.segment}"
        if self.parts == {"core"}:
            return "selective"
        return "+".join(part for part in PARTS if part in self.parts) or "none"

    @property
    def core(self) -> bool:
        """Whether the forward of attention is repeated in backward."""
        return self.segment > 0 or "core" in self.parts


NONE, SELECTIVE, FULL = Recompute(), Recompute(parts=frozenset({"core"})), Recompute(segment=1)
MODES = (NONE, SELECTIVE, FULL)  # those of the papers, from the least to the most
