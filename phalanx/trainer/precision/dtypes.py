"""Which number formats a run keeps its weights, activations and gradients in."""

from dataclasses import dataclass, replace

import torch

from phalanx.core.precision import Precision
from phalanx.core.run import Run
from phalanx.trainer.precision.loss_scale import INITIAL, LossScale

_COMPUTE = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a run.

    Attributes:
        precision: as layouts write it, resolved.
        compute: of weights and activations, and of products that no recipe rounds further.
        master: of the weights that the optimizer moves.
        gradient: where gradients are accumulated and reduced, and of the optimizer's moments.
    """

    precision: Precision
    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype = torch.float32

    @classmethod
    def named(cls, precision: Precision | str, device: torch.device) -> "Dtypes":
        """Those of a precision of layouts; auto is bf16 on a GPU and fp32 on a CPU.

        16-bit formats have fp32 masters.

        Args:
            precision: of a layout, or a word that `Precision.parse` reads.
            device: decides what auto means.

        Raises:
            UsageError: there is no such word.
        """
        asked = Precision.parse(precision) if isinstance(precision, str) else precision
        known = asked.on("bf16" if device.type == "cuda" else "fp32")
        master = torch.float64 if known.rest == "fp64" else torch.float32
        return cls(known, _COMPUTE[known.rest], master, master)

    @classmethod
    def of(cls, run: Run, device: torch.device) -> "Dtypes":
        """Those of a run: its layout's, with the master weights that its recipe wants.

        Args:
            run: gives the layout's precision and the recipe.
            device: decides what auto means.
        """
        named = cls.named(run.layout.precision, device)
        if run.recipe.master_weights == "fp32":
            return named
        return replace(named, master=named.compute)

    @property
    def recipe(self) -> str:
        """How the products of projections round their operands; empty if they do not."""
        return self.precision.recipe

    @property
    def rest(self) -> str:
        """The name of `compute`."""
        return self.precision.rest

    def loss_scale(self) -> LossScale:
        """What the loss of the first step is multiplied with."""
        if self.compute == torch.float16:
            return LossScale(INITIAL, dynamic=True)
        return LossScale()
