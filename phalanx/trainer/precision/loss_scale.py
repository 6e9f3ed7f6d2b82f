"""The loss scale of fp16: gradients are made larger so that few of them vanish, and small again.

A gradient below 2^-24 is zero in fp16, and many are (Micikevicius et al. 2017, arXiv:1710.03740,
section 3.2). The loss is multiplied by a power of two before backward, and what arrives divided
by it, exactly. The power is found by trying: an overflow skips the step and halves it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

INITIAL = 2.0**16
PATIENCE = 2000  # clean steps until a larger one is tried


@dataclass
class LossScale:
    """The factor of the next step's loss, and how it came about; the same on every rank.

    Every rank decides alike, because all know the norm of the whole gradient: one overflow
    anywhere makes it infinite everywhere.

    Attributes:
        value: the factor; 1 in every format but fp16, and never less.
        clean: steps in a row without an overflow.
        dynamic: whether it follows what happens.
    """

    value: float = 1.0
    clean: int = 0
    dynamic: bool = False

    @property
    def can_fall(self) -> bool:
        """Whether the next overflow may be cured by a smaller scale."""
        return self.dynamic and self.value > 1

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide reduced gradients by the factor, in place; what overflowed stays infinite."""
        if self.value != 1:
            for gradient in gradients:
                gradient.mul_(1 / self.value)

    def learn(self, *, skipped: bool) -> None:
        """Halve it after an overflow, double it after 2,000 clean steps."""
        if not self.dynamic:
            return
        self.clean = 0 if skipped else self.clean + 1
        if skipped:
            self.value = max(self.value / 2, 1.0)
        elif self.clean == PATIENCE:
            self.value, self.clean = self.value * 2, 0
