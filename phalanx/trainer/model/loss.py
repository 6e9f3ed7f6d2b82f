"""Cross-entropy over a vocabulary that is cut over ranks: no rank ever holds all logits.

The projection to the vocabulary and the loss can also be taken together, some tokens at a time:
then not even a rank's own part of the logits ever stands whole.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, the parallel cross-entropy.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.ops.kernels import times
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.tensor import TensorParallel

IGNORED = -100


class VocabSlice(NamedTuple):
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


def token_losses(logits: Tensor, targets: Tensor, part: VocabSlice) -> Tensor:
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
    """One tensor like the logits is saved, in fp32 or wider, and becomes their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: VocabSlice) -> Tensor:
        losses, softmax = _softmax_losses(logits, targets, part)
        ctx.save_for_backward(*softmax)
        ctx.part, ctx.dtype = part, logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax = _Softmax(*cast(tuple[Tensor, ...], ctx.saved_tensors))
        return softmax.gradient(grads[0], ctx.part).to(ctx.dtype), None, None


class _Softmax(NamedTuple):
    """What the gradient of a few tokens' logits is made from.

    Attributes:
        exps: exp(z - largest z), [n, V/t].
        share: one over their sum over the whole vocabulary, [n].
        column: where in this rank's part the target lies, [n, 1]; 0 where it does not.
        mine: whether it does, [n].
        valid: whether the token counts, [n].
    """

    exps: Tensor
    share: Tensor
    column: Tensor
    mine: Tensor
    valid: Tensor

    def gradient(self, upstream: Tensor, part: VocabSlice) -> Tensor:
        """Gradient of the logits, [n, V/t], for that of the losses, [n]; takes up `exps`."""
        e, each = part.smoothing, (upstream * self.valid).unsqueeze(-1)
        grad = self.exps.mul_(each * self.share.unsqueeze(-1))
        if e:
            grad.sub_(each * (e / part.vocab))
        return grad.scatter_add_(-1, self.column, each * self.mine.unsqueeze(-1) * (e - 1))


def _softmax_losses(
    logits: Tensor, targets: Tensor, part: VocabSlice, *, takes_logits: bool = False
) -> tuple[Tensor, _Softmax]:
    """Loss = log sum exp z - (1 - e) z_target - (e / V) sum z, for smoothing e.

    Args:
        logits: [n, V/t].
        targets: int64 [n].
        part: of the vocabulary.
        takes_logits: the logits are not needed again, and their memory may be.

    Returns:
        [n], and what the gradient of the logits is made from.
    """
    valid = targets != IGNORED
    local = targets - part.first
    mine = valid & (local >= 0) & (local < logits.shape[-1])
    column = local.where(mine, 0).unsqueeze(-1)
    wide = logits.to(_wide(logits.dtype))
    largest = wide.amax(-1, keepdim=True)
    part.group.all_reduce(largest, "loss maximum", largest=True).wait()
    keeps = wide is logits and not takes_logits
    shifted = wide - largest if keeps else wide.sub_(largest)
    target = shifted.gather(-1, column).squeeze(-1) * mine
    plain = shifted.sum(-1) if part.smoothing else torch.zeros_like(target)
    exps = shifted.exp_()
    sums = torch.stack([exps.sum(-1), target, plain])
    part.group.all_reduce(sums, "loss sums").wait()
    total, target, plain = sums
    e = part.smoothing
    losses = (total.log() - (1 - e) * target - e / part.vocab * plain) * valid
    return losses, _Softmax(exps, total.reciprocal(), column, mine, valid)


@dataclass(frozen=True)
class ChunkedLoss:
    """Projection and cross-entropy together, `tokens` tokens at a time.

    Forward makes the gradients of a chunk as soon as it has its logits, as if the gradient of the
    loss were 1; backward only scales them. So no logits are saved or computed twice, and what is
    saved has the size of the input and of the matrix. Source: Hsu et al. 2024 (arXiv:2410.10989),
    section 3.2.

    Attributes:
        tp: how this rank takes part in the product.
        part: its part of the vocabulary.
        tokens: whose logits are alive at once; at least 1.
    """

    tp: TensorParallel
    part: VocabSlice
    tokens: int

    def sum(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of all valid tokens, in fp32 or wider.

        Args:
            x: [s/t, b, h] under sequence parallelism, else [s, b, h].
            weight: [V/t, h].
            targets: int64 [s, b].

        Returns:
            A scalar, the same on every rank.
        """
        learns = torch.is_grad_enabled()
        return cast(Tensor, apply(_ChunkedLoss, self, learns, x, weight, targets))


class _ChunkedLoss(torch.autograd.Function):
    """Gather, then for each chunk: product, loss, and the two products of its gradients."""

    @staticmethod
    def forward(
        ctx: Any, loss: ChunkedLoss, learns: bool, x: Tensor, weight: Tensor, targets: Tensor
    ) -> Tensor:
        whole, pending = loss.tp.gather_sequence(x, "tp input")
        pending.wait()
        rows, ids = (y.flatten(0, 1).split(loss.tokens) for y in (whole, targets.unsqueeze(-1)))
        total = torch.zeros((), dtype=_wide(x.dtype), device=x.device)
        dx, dw = torch.empty_like(whole) if learns else whole, _SumOfProducts(several=len(rows) > 1)
        for i, dx_rows in enumerate(dx.flatten(0, 1).split(loss.tokens)):
            each, grad = _chunk(times(rows[i], weight), ids[i].squeeze(-1), loss.part, learns)
            total += each
            if grad is not None:
                dx_rows.copy_(times(grad, weight.t()))
                dw.add(grad.t(), rows[i])
            del grad  # before the next chunk has its logits
        if learns:
            dx, reduced = loss.tp.reduce_sequence(dx, "tp input gradient")
            reduced.wait()
            ctx.save_for_backward(dx, dw.result(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, Tensor, None]:
        dx, dw = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        return None, None, dx.mul_(grads[0]), dw.mul_(grads[0]), None


def _chunk(
    logits: Tensor, targets: Tensor, part: VocabSlice, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum of the losses of a few tokens, and the gradient of their logits, in the same memory."""
    losses, softmax = _softmax_losses(logits, targets, part, takes_logits=True)
    dtype = logits.dtype
    del logits
    if not learns:
        return losses.sum(), None
    return losses.sum(), softmax.gradient(torch.ones_like(losses), part).to(dtype)


class _SumOfProducts:
    """A sum of products, added up in fp32 or wider where there are several."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._total: Tensor | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a b."""
        wide = _wide(a.dtype)
        if self._total is None:
            self._total = (a @ b).to(wide if self._several else a.dtype)
        elif a.dtype == wide:
            self._total.addmm_(a, b)
        else:
            self._total += a @ b

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum so far."""
        if self._total is None:
            raise ValueError("no token has a loss")
        return self._total.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
