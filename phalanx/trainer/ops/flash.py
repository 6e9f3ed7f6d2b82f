"""Attention of some queries to one block of keys, in a form that other blocks can be merged into.

A softmax over many keys is put together from softmaxes over blocks of them, if each also returns
the logarithm of its sum of exponentials (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al.
2022, arXiv:2205.14135, section 3.1). Scores never stand in memory where torch has a kernel for it.

Shapes: b sequences, a query heads, g key heads, n queries, m keys, d and w the widths of a key and
of a value.
"""

import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


class ScoreRule(NamedTuple):
    """How scores of queries and keys are made, and which of them count.

    Attributes:
        window: tokens that a token sees, itself included; 0 means all before it.
        cap: scores are cap tanh(score / cap) (Gemma 2, arXiv:2408.00118, section 2); 0 caps none.
        scale: of scores; 0 means 1 / sqrt(d).
    """

    window: int = 0
    cap: float = 0.0
    scale: float = 0.0


class AttentionBlock(NamedTuple):
    """Queries and the keys that they look at.

    Attributes:
        q: [b, a, n, d].
        k: [b, g, m, d]; a is a multiple of g.
        v: [b, g, m, w].
        mask: bool [b, 1, n, m], true where a query may look; None where it may look everywhere.
        causal: query i looks at keys 0 to i only; then there is no mask.
        rule: how scores are made.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False
    rule: ScoreRule = ScoreRule()

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.rule.scale or 1 / math.sqrt(self.q.shape[-1])


class Attended(NamedTuple):
    """What queries have found in the keys that they have seen so far.

    Attributes:
        out: [b, a, n, w], the values weighed by a softmax over these keys.
        lse: [b, a, n], log of the sum of exponentials of the scores, in fp32 or wider; -inf for a
            query that may look at none of the keys, whose `out` is zero.
    """

    out: Tensor
    lse: Tensor

    def rows(self, queries: slice) -> "Attended":
        """That of some of the queries."""
        return Attended(self.out[:, :, queries], self.lse[:, :, queries])


def attend_block(block: AttentionBlock) -> Attended:
    """softmax(q k^T / sqrt(d)) v over the keys of a block, and the sums behind it."""
    same = _of_one_width(block)
    if not _has_kernel(same):
        return _plain(block)
    scale = block.scale
    if block.q.is_cuda:
        op = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = op(same.q, same.k, same.v, 0.0, block.causal, scale=scale)[:2]
    else:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        bias = _bias(block)
        out, lse = op(same.q, same.k, same.v, 0.0, block.causal, attn_mask=bias, scale=scale)
    if block.mask is not None:
        lse = lse.masked_fill(~block.mask.any(-1), -math.inf)
    return Attended(out[..., : block.v.shape[-1]], lse)


def differentiate_block(
    block: AttentionBlock, done: Attended, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values of one block.

    Args:
        block: one of those that the queries have seen.
        done: over all the blocks: their sums say which share this one has.
        grad: like `done.out`.

    Returns:
        Gradients like q, k and v.
    """
    same = _of_one_width(block)
    if not _has_kernel(same):
        return _plain_gradients(block, done, grad)
    out, grad = (_widened(x, same.v.shape[-1]) for x in (done.out, grad))
    sums, scale = done.lse, block.scale
    if block.q.is_cuda:
        grads = _cuda_gradients(same, Attended(out, sums), grad, scale)
    else:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        arguments = (grad, same.q, same.k, same.v, out, sums, 0.0, block.causal)
        grads = op(*arguments, attn_mask=_bias(block), scale=scale)
    wanted = (block.q, block.k, block.v)
    dq, dk, dv = (g[..., : x.shape[-1]] for g, x in zip(grads, wanted, strict=True))
    return dq, dk, dv


def merge(total: Attended, found: Attended) -> None:
    """Take what queries found in one more block into `total`, in place.

    Both are weighed by their shares of the sum of exponentials over all keys. Every query must
    have seen some key before.

    Args:
        total: over the blocks so far, fp32 or wider.
        found: in a block of other keys, for the same queries.
    """
    lse = torch.logaddexp(total.lse, found.lse)
    before, now = ((x - lse).exp().unsqueeze(-1) for x in (total.lse, found.lse))
    total.out.mul_(before).add_(found.out * now)
    total.lse.copy_(lse)


def document_mask(queries: Tensor, keys: Tensor, *, causal: bool) -> Tensor:
    """Where a query and a key are of one document: int [b, n] and [b, m] to bool [b, 1, n, m].

    Args:
        queries: the document of each query.
        keys: the document of each key.
        causal: query i looks at keys 0 to i only.
    """
    same = queries.unsqueeze(-1) == keys.unsqueeze(-2)
    if causal:
        same &= torch.ones_like(same[0]).tril()
    return same.unsqueeze(1)


def window_mask(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Where a query sees a key: no later one, and none that is `window` or more before it.

    Args:
        queries: int [n], the place of each in the sequence.
        keys: int [m].
        window: tokens seen, itself included.

    Returns:
        bool [1, 1, n, m].
    """
    before = queries.unsqueeze(-1) - keys
    return ((before >= 0) & (before < window))[None, None]


def with_sinks(done: Attended, sinks: Tensor) -> Attended:
    """Let each head's own score take its share of the softmax: it selects nothing.

    Source: Xiao et al. 2023 (arXiv:2309.17453), section 3.2; gpt-oss (arXiv:2508.10925).

    Args:
        done: over all keys.
        sinks: [a], a score of each head.
    """
    lse = torch.logaddexp(done.lse, sinks.to(done.lse.dtype)[:, None])
    share = (done.lse - lse).exp().unsqueeze(-1)
    return Attended((done.out * share).to(done.out.dtype), lse)


def sink_gradients(done: Attended, grad: Tensor, sinks: Tensor) -> Tensor:
    """Of each head's own score, [a]: its share moves the others' away from what they found.

    Args:
        done: with sinks.
        grad: like `done.out`.
        sinks: [a].
    """
    wide = done.lse.dtype
    share = (sinks.to(wide)[:, None] - done.lse).exp()
    found = (grad.to(wide) * done.out.to(wide)).sum(-1)
    return -(share * found).sum((0, 2)).to(sinks.dtype)


def _has_kernel(block: AttentionBlock) -> bool:
    if block.rule.cap:
        return False
    if block.q.is_cuda:
        return block.q.dtype in _HALF and block.mask is None and block.q.shape[-1] % 8 == 0
    return block.q.device.type == "cpu"


def _of_one_width(block: AttentionBlock) -> AttentionBlock:
    """Kernels want keys as wide as values; zeros change neither scores nor what is found."""
    width = max(block.q.shape[-1], block.v.shape[-1])
    q, k, v = (_widened(x, width) for x in (block.q, block.k, block.v))
    return block._replace(q=q, k=k, v=v)


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _bias(block: AttentionBlock) -> Tensor | None:
    """The mask as numbers that are added to scores."""
    if block.mask is None:
        return None
    bias = torch.zeros(block.mask.shape, dtype=block.q.dtype, device=block.q.device)
    return bias.masked_fill_(~block.mask, -math.inf)


def _cuda_gradients(
    block: AttentionBlock, done: Attended, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The flash kernel's; nothing is dropped, so the state of its generator is never read."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    given = (grad, block.q, block.k, block.v, done.out, done.lse.contiguous(), None, None)
    lengths = (block.q.shape[2], block.k.shape[2])
    grads = op(*given, *lengths, 0.0, block.causal, unused, unused[0], scale=scale)
    return cast(tuple[Tensor, Tensor, Tensor], grads)


def _plain(block: AttentionBlock) -> Attended:
    """By the formula, every score in memory; for devices and formats without a kernel."""
    scores = _masked(block, _scores(block))
    lse = scores.logsumexp(-1)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    shares = (scores - finite.unsqueeze(-1)).exp()
    _, v = _repeated(block)
    return Attended((shares @ v).to(block.q.dtype), lse)


def _plain_gradients(
    block: AttentionBlock, done: Attended, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """With P = exp(S - lse): dV = P^T dO, dS = P (dO V^T - sum of dO O), dQ = dS K, dK = dS^T Q."""
    k, v = _repeated(block)
    q, grad = block.q.to(k.dtype), grad.to(k.dtype)
    shares = (_masked(block, _scores(block)) - done.lse.unsqueeze(-1)).exp()
    mean = (grad * done.out).sum(-1, keepdim=True)
    d_scores = shares * (grad @ v.transpose(-1, -2) - mean) * block.scale
    if block.rule.cap:
        d_scores *= 1 - (_scores(block) / block.rule.cap).square()
    groups = (block.k.shape[1], -1)
    dk = (d_scores.transpose(-1, -2) @ q).unflatten(1, groups).sum(2)
    dv = (shares.transpose(-1, -2) @ grad).unflatten(1, groups).sum(2)
    return (d_scores @ k).to(block.q.dtype), dk.to(block.k.dtype), dv.to(block.v.dtype)


def _scores(block: AttentionBlock) -> Tensor:
    k, _ = _repeated(block)
    scores = block.q.to(k.dtype) @ k.transpose(-1, -2) * block.scale
    cap = block.rule.cap
    return cap * (scores / cap).tanh() if cap else scores


def _masked(block: AttentionBlock, scores: Tensor) -> Tensor:
    mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril() if block.causal else block.mask
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _repeated(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Keys and values once for each query head, in fp32 or wider."""
    wide = torch.promote_types(block.q.dtype, torch.float32)
    times = block.q.shape[1] // block.k.shape[1]
    k, v = (x.to(wide).repeat_interleave(times, 1) for x in (block.k, block.v))
    return k, v
