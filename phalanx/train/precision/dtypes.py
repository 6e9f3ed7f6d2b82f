"""Which number formats a run keeps its weights, activations and gradients in."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The number formats of a run.

    Attributes:
        compute: of weights and activations in matrix products.
        master: of the weights that the optimizer moves, of its moments, and of gradients where
            they are accumulated and reduced.
        name: fp32, fp64 or bf16, as layouts write it.
    """

    name: str
    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def named(cls, name: str, device: torch.device) -> "Precision":
        """fp32, fp64, bf16 (with fp32 masters), or auto: bf16 on a GPU and fp32 on a CPU."""
        if name == "auto":
            name = "bf16" if device.type == "cuda" else "fp32"
        compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[name]
        return cls(name, compute, torch.float64 if name == "fp64" else torch.float32)
