"""What a stage needs to know about the tokens of one micro-batch, whichever stage it is."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.trainer.parallel.context import ContextParallel, undivided


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch, the sequence first: the tokens of this rank's part of it, s/c of s.

    The sequence may be padded at its end, so that cp and tp can cut it. Where sp cuts it once more,
    a rank still sees the tokens of all its tp ranks here.

    Attributes:
        tokens: int64 [s/c, b].
        targets: int64 [s/c, b]; -100 where no prediction counts.
        positions: int64 [s/c, b], each token's place in its document.
        documents: int32 [b, s], which document each token of the whole sequence belongs to; None
            where a sequence is one.
        samples: int64 [b], place of each sequence in the global batch.
        seq: s without padding, the same under every layout.
        step: the optimizer step, for dropout.
        loss_scale: what every loss of the step is multiplied with.
        context: the ranks that hold the rest of the sequence, and which part is this one's.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
    samples: Tensor
    seq: int
    step: int
    loss_scale: float = 1.0
    context: ContextParallel = field(default_factory=undivided)

    @property
    def places(self) -> Tensor:
        """Where in the whole sequence each token of this rank stands: int64 [s/c]."""
        seq = len(self.tokens) * self.context.group.size
        return self.context.my_part(torch.arange(seq, device=self.tokens.device))
