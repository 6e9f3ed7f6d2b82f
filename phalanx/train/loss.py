"""Cross-entropy over a vocabulary that is cut over ranks: no rank ever holds all logits.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, the parallel cross-entropy.
"""

from typing import Any, NamedTuple, cast

import torch
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
    losses = cast(Tensor, apply(_CrossEntropy, logits.flatten(0, -2), targets.flatten(), part))
    return losses.view(targets.shape)


class _CrossEntropy(torch.autograd.Function):
    """Loss = log sum exp z - (1 - e) z_target - (e / V) sum z, for smoothing e.

    One tensor of the size of the logits is kept, in fp32 or wider, and becomes their gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: Slice) -> Tensor:
        valid = targets != IGNORED
        local = targets - part.first
        mine = valid & (local >= 0) & (local < logits.shape[-1])
        column = local.where(mine, 0).unsqueeze(-1)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        largest = wide.amax(-1, keepdim=True)
        part.group.all_reduce(largest, "loss maximum", largest=True).wait()
        shifted = wide - largest if wide is logits else wide.sub_(largest)
        target = shifted.gather(-1, column).squeeze(-1) * mine
        plain = shifted.sum(-1) if part.smoothing else torch.zeros_like(target)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), target, plain])
        part.group.all_reduce(sums, "loss sums").wait()
        total, target, plain = sums
        e = part.smoothing
        ctx.save_for_backward(exps, total.reciprocal(), column, mine, valid)
        ctx.part, ctx.dtype = part, logits.dtype
        return cast(Tensor, (total.log() - (1 - e) * target - e / part.vocab * plain) * valid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        exps, share, column, mine, valid = cast(tuple[Tensor, ...], ctx.saved_tensors)
        e, vocab = ctx.part.smoothing, ctx.part.vocab
        upstream = (grads[0] * valid).unsqueeze(-1)
        grad = exps.mul_(upstream * share.unsqueeze(-1))
        if e:
            grad.sub_(upstream * (e / vocab))
        grad.scatter_add_(-1, column, upstream * mine.unsqueeze(-1) * (e - 1))
        return grad.to(ctx.dtype), None, None
