"""Which number formats a run keeps its weights, activations and gradients in."""

from dataclasses import dataclass

import torch

from phalanx.train.precision.loss_scale import INITIAL, LossScale

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
        compute: of weights and activations in matrix products.
        master: of the weights that the optimizer moves, of its moments, and of gradients where
            they are accumulated and reduced.
        name: fp32, fp64, bf16 or fp16, as layouts write it.
    """

    name: str
    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def named(cls, name: str, device: torch.device) -> "Precision":
        """A precision of layouts; auto is bf16 on a GPU and fp32 on a CPU.

        16-bit formats have fp32 masters.
        """
        if name == "auto":
            name = "bf16" if device.type == "cuda" else "fp32"
        master = torch.float64 if name == "fp64" else torch.float32
        return cls(name, _COMPUTE[name], master)

    def loss_scale(self) -> LossScale:
        """What the loss of the first step is multiplied with."""
        if self.compute == torch.float16:
            return LossScale(INITIAL, dynamic=True)
        return LossScale()
