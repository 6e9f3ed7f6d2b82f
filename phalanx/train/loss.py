"""Cross-entropy over a vocabulary that is cut over ranks: no rank ever holds all logits.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, the parallel cross-entropy.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.train.autograd import apply
from phalanx.train.comm import Group

IGNORED = -100


class Slice(NamedTuple):
    """The part of the vocabulary that a rank holds.

    Attributes:
        first: its first id.
        vocab: size of the whole vocabulary.
        smoothing: share of each target spread evenly over the vocabulary.
        group: the ranks that hold the rest.
    """

    first: int
    vocab: int
    smoothing: float
    group: Group


def token_losses(logits: Tensor, targets: Tensor, part: Slice) -> Tensor:
    """-log softmax(logits)[target] of every token, in fp32 or wider.

    Args:
        logits: [..., V/t], this rank's part.
        targets: int64 [...], ids in the whole vocabulary, or -100 to count nothing.
        part: which part of the vocabulary it is.

    Returns:
        [...], zero where the target is -100; the same on every rank.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    rows, ids = wide.flatten(0, -2), targets.flatten()
    if part.group.size == 1:
        losses = F.cross_entropy(
            rows, ids, ignore_index=IGNORED, reduction="none", label_smoothing=part.smoothing
        )
    else:
        losses = cast(Tensor, apply(_ParallelCrossEntropy, rows, ids, part))
    return losses.view(targets.shape)


class _ParallelCrossEntropy(torch.autograd.Function):
    """Loss = log sum exp z - (1 - e) z_target - (e / V) sum z, for smoothing e."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: Slice) -> Tensor:
        valid = targets != IGNORED
        local = targets - part.first
        mine = valid & (local >= 0) & (local < logits.shape[-1])
        column = local.where(mine, 0).unsqueeze(-1)
        largest = logits.amax(-1)
        part.group.all_reduce(largest, "loss maximum", largest=True).wait()
        shifted = logits - largest.unsqueeze(-1)
        target = shifted.gather(-1, column).squeeze(-1) * mine
        plain = shifted.sum(-1) if part.smoothing else torch.zeros_like(target)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), target, plain])
        part.group.all_reduce(sums, "loss sums").wait()
        total, target, plain = sums
        e = part.smoothing
        ctx.save_for_backward(exps.div_(total.unsqueeze(-1)), column, mine, valid)
        ctx.part = part
        return cast(Tensor, (total.log() - (1 - e) * target - e / part.vocab * plain) * valid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax, column, mine, valid = cast(tuple[Tensor, ...], ctx.saved_tensors)
        part = cast(Slice, ctx.part)
        grad = softmax - part.smoothing / part.vocab if part.smoothing else softmax.clone()
        hit = (mine.to(grad.dtype) * (part.smoothing - 1)).unsqueeze(-1)
        grad.scatter_add_(-1, column, hit)
        return grad.mul_((grads[0] * valid).unsqueeze(-1)), None, None
