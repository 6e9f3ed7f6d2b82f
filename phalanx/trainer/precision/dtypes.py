"""Which number formats a run keeps its weights, activations and gradients in."""

from dataclasses import dataclass, replace

import torch

from phalanx.core.precision import formats
from phalanx.core.run import Run
from phalanx.trainer.precision.loss_scale import INITIAL, LossScale

_COMPUTE = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Precision:
    """The number formats of a run.

    Attributes:
        name: as layouts write it, resolved.
        compute: of weights and activations, and of products that no recipe rounds further.
        master: of the weights that the optimizer moves.
        gradient: where gradients are accumulated and reduced, and of the optimizer's moments.
        recipe: how the products of projections round their operands; empty if they do not.
        rest: the name of `compute`.
    """

    name: str
    compute: torch.dtype
    master: torch.dtype
    recipe: str = ""
    rest: str = ""
    gradient: torch.dtype = torch.float32

    @classmethod
    def named(cls, name: str, device: torch.device) -> "Precision":
        """A precision of layouts; auto is bf16 on a GPU and fp32 on a CPU.

        16-bit formats have fp32 masters.
        """
        if name == "auto":
            name = "bf16" if device.type == "cuda" else "fp32"
        recipe, rest = formats(name)
        master = torch.float64 if rest == "fp64" else torch.float32
        return cls(name, _COMPUTE[rest], master, recipe, rest, master)

    @classmethod
    def of(cls, run: Run, device: torch.device) -> "Precision":
        """That of a run: its layout's, with the master weights that its recipe wants."""
        named = cls.named(run.layout.precision, device)
        if run.recipe.master_weights == "fp32":
            return named
        return replace(named, master=named.compute)

    def loss_scale(self) -> LossScale:
        """What the loss of the first step is multiplied with."""
        if self.compute == torch.float16:
            return LossScale(INITIAL, dynamic=True)
        return LossScale()
