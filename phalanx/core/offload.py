"""What leaves the device between its uses, as a layout's `offload=` says it."""

from dataclasses import dataclass, fields

from phalanx.core.errors import UsageError


@dataclass(frozen=True)
class Offload:
    """What leaves the device.

    Attributes:
        activations: all that forward saves for backward, block by block.
        optimizer: master weights, moments and gradients, with their update (Ren et al. 2021,
            arXiv:2101.06840).
        nvme: the same, and the weights, in files (Rajbhandari et al. 2021, arXiv:2104.07857).

    Example:
        >>> Offload.parse("activations+nvme").state
        True
    """

    activations: bool = False
    optimizer: bool = False
    nvme: bool = False

    @classmethod
    def parse(cls, text: str) -> "Offload":
        """Read `none`, or names joined by a plus.

        Raises:
            UsageError: a word that does not exist.
        """
        names = [field.name for field in fields(cls)]
        words = set(text.lower().split("+")) - {"none"}
        if not words <= set(names):
            raise UsageError(f"offload={text}; offload can be none, {', '.join(names)}")
        return cls(**dict.fromkeys(words, True))

    def __str__(self) -> str:
        """The words that `parse` reads."""
        return "+".join(f.name for f in fields(self) if getattr(self, f.name)) or "none"

    @property
    def state(self) -> bool:
        """Whether the optimizer's state leaves the device."""
        return self.optimizer or self.nvme

    def __bool__(self) -> bool:
        """Whether anything leaves the device."""
        return self.activations or self.state


STAYS = Offload()  # nothing leaves the device
