"""What a stage needs to know about the tokens of one micro-batch, whichever stage it is."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch, the sequence first. All tensors are whole: no rank holds a part.

    The sequence may be padded at its end, so that tp can cut it.

    Attributes:
        tokens: int64 [s, b].
        targets: int64 [s, b]; -100 where no prediction counts.
        positions: int64 [s, b], each token's place in its document.
        documents: int32 [b, s], which document each token belongs to; None where a sequence is one.
        samples: int64 [b], place of each sequence in the global batch.
        seq: s without padding, the same under every layout.
        step: the optimizer step, for dropout.
        loss_scale: what every loss of the step is multiplied with.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
    samples: Tensor
    seq: int
    step: int
    loss_scale: float = 1.0

    def attention_mask(self) -> Tensor | None:
        """Mask [b, 1, s, s], true where a token may look: back, within its own document.

        None where every sequence is one document, so that the kernel's causal mask will do.
        """
        if self.documents is None:
            return None
        same = self.documents.unsqueeze(-1) == self.documents.unsqueeze(-2)
        return (same & torch.ones_like(same[0]).tril()).unsqueeze(1)
