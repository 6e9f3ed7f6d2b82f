"""Operations that torch does slowly or coarsely on a CPU. On a GPU its own are used.

`benchmarks/gemm_share.py` measures what they gain; the reasons are in
docs/decisions/0006-faster-than-torch-on-cpu.md.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.ops.flash import (
    Attended,
    AttentionBlock,
    ScoreRule,
    attend_block,
    differentiate_block,
    sink_gradients,
    with_sinks,
)

_ONEDNN = (
    torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
PLAIN_SCORES = ScoreRule()
_WORTHWHILE = 1 << 23  # multiplications below which oneDNN's set-up costs more than it gains


def times(x: Tensor, w: Tensor) -> Tensor:
    """Multiply x w^T, without autograd: [..., n_in] and [n_out, n_in] to [..., n_out].

    In fp32 oneDNN multiplies faster than the BLAS that torch calls, except with `x` transposed.

    Args:
        x: any strides.
        w: of the dtype of x, which the result has too.
    """
    large = x.numel() * w.shape[0] >= _WORTHWHILE
    if _ONEDNN and large and x.dtype == torch.float32 and x.device.type == "cpu":
        return cast(Tensor, _onednn_product(x, w))
    return F.linear(x, w)


@torch.library.custom_op("phalanx::onednn_product", mutates_args=())
def _onednn_product(x: Tensor, w: Tensor) -> Tensor:
    """An operator of its own, so that a compiled block can contain it."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""))


@_onednn_product.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rule: ScoreRule = PLAIN_SCORES,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v without keeping the scores; causal where there is no mask.

    On a CPU torch fuses this only for values as wide as keys: narrower ones are padded on the way
    into its kernel, and not kept so.

    Args:
        q: [b, a, s, d].
        k: [b, g, s, d]; a is a multiple of g.
        v: [b, g, s, d_v].
        mask: bool, to be broadcast to [b, a, s, s]; a window is in it.
        rule: how scores are made.
        sinks: [a], a score of each head that selects nothing.

    Returns:
        [b, a, s, d_v].
    """
    narrow = v.shape[-1] < k.shape[-1] and v.device.type == "cpu"
    if narrow or rule.cap or sinks is not None:
        return cast(Tensor, apply(_OneBlock, (rule, mask), q, k, v, sinks))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=rule.scale or None,
        enable_gqa=q.shape[1] != k.shape[1],
    )


class _OneBlock(torch.autograd.Function):
    """Flash attention (Dao et al. 2022, arXiv:2205.14135) where torch has none: d_v < d, caps."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[ScoreRule, Tensor | None],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        rule, mask = how
        done = attend_block(AttentionBlock(q, k, v, mask, mask is None, rule))
        done = done if sinks is None else with_sinks(done, sinks)
        b, a, s, _ = q.shape
        out = q.new_empty(s, b, a, v.shape[-1]).permute(1, 2, 0, 3).copy_(done.out)
        ctx.how = how
        ctx.save_for_backward(q, k, v, out, done.lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, sinks = cast(tuple[Tensor, ...], ctx.saved_tensors)
        rule, mask = cast(tuple[ScoreRule, Tensor | None], ctx.how)
        block = AttentionBlock(q, k, v, mask, mask is None, rule)
        done = Attended(out, sums)
        found = differentiate_block(block, done, grads[0])
        own = None if sinks is None else sink_gradients(done, grads[0], sinks)
        return None, *found, own


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight along the last dim, in fp32 or wider.

    Keeps x and one number per row for backward.

    Args:
        x: [..., n].
        weight: [n].
        eps: added to the mean square.

    Returns:
        [..., n] in the dtype of x.
    """
    if x.device.type == "cpu":
        return cast(Tensor, apply(_RMSNorm, x, weight, eps))
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias along the last dim.

    On a CPU torch adds the gradients of weight and bias up in the format of x: over 8,192 tokens in
    bf16 they are off by 7 percent. Here they are summed in fp32.

    Args:
        x: [..., n].
        weight: [n].
        bias: [n].
        eps: added to the variance.

    Returns:
        [..., n] in the dtype of x.
    """
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return cast(Tensor, apply(_LayerNorm, x, weight, bias, eps))
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def grouped_times(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply the rows of each group by its own matrix, without autograd.

    Args:
        rows: [R, n_in], group after group.
        weights: [E, n_out, n_in].
        counts: rows of each of the E groups.

    Returns:
        [R, n_out].
    """
    if _fused_groups(rows, weights.shape[1]):
        ends = _ends(counts, rows.device)
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    out = rows.new_empty(len(rows), weights.shape[1])
    for x, w, y in zip(rows.split(counts), weights, out.split(counts), strict=True):
        torch.mm(x, w.t(), out=y)
    return out


def grouped_outer(left: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    """For each group the product left^T right: [R, n] and [R, k] to [E, n, k].

    Args:
        left: rows, group after group.
        right: likewise, of the same dtype.
        counts: rows of each of the E groups; they sum to R, and one without rows gives zeros.
    """
    if _fused_groups(left, right.shape[1]):
        ends = _ends(counts, left.device)
        return torch._grouped_mm(left.t(), right, offs=ends)
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for a, b, y in zip(left.split(counts), right.split(counts), out, strict=True):
        torch.mm(a.t(), b, out=y)
    return out


def weighed_sums(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    """Fill `out` [T, h] with the sum of each token's rows by weight: [T, K, h] and [T, K].

    A CPU does thousands of products of one row slower than K sweeps over all of them.

    Args:
        rows: K of each token.
        weights: of the same dtype.
        out: of the same dtype; what it holds is lost.
    """
    if rows.device.type == "cuda":
        torch.bmm(weights.unsqueeze(1), rows, out=out.unsqueeze(1))
        return
    torch.mul(rows[:, 0], weights[:, :1], out=out)
    for k in range(1, rows.shape[1]):
        out.addcmul_(rows[:, k], weights[:, k : k + 1])


def dot_each(rows: Tensor, x: Tensor) -> Tensor:
    """For each token the dot products of its rows and a vector: [T, K, h] and [T, h] to [T, K].

    Args:
        rows: K of each token.
        x: the vector of each token, of the same dtype.
    """
    if rows.device.type == "cuda":
        return torch.bmm(rows, x.unsqueeze(-1)).squeeze(-1)
    return torch.stack([torch.linalg.vecdot(row, x) for row in rows.unbind(1)], -1)


def _fused_groups(x: Tensor, width: int) -> bool:
    """Whether one kernel does all groups: on a GPU, in bf16, with rows of whole 16 bytes."""
    whole = x.shape[-1] % 8 == width % 8 == 0
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and whole


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


class _RMSNorm(torch.autograd.Function):
    """With u = x r: dx = r (g w - u mean(g w u)), dw = sum of g u over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = widened(x)
        r = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, r)
        return cast(Tensor, (wide * r).mul_(weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = cast(tuple[Tensor, Tensor, Tensor], ctx.saved_tensors)
        g, w, u = widened(grads[0]), widened(weight), widened(x) * r
        products = g * u
        mean = (products @ w).div_(x.shape[-1]).unsqueeze(-1)
        dx = (g * w).addcmul_(u, mean, value=-1).mul_(r)
        dw = products.flatten(0, -2).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class _LayerNorm(torch.autograd.Function):
    """As `_RMSNorm` of x less its mean: u = (x - mean) r, and dx loses its own mean too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean
        variance = torch.linalg.vecdot(centred, centred).div_(x.shape[-1])
        r = variance.add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, mean, r)
        ctx.dtype = bias.dtype
        return centred.mul_(r).mul_(weight).add_(bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, r = cast(tuple[Tensor, ...], ctx.saved_tensors)
        g, u = grads[0].float(), (x.float() - mean) * r
        dw, db = (g * u).flatten(0, -2).sum(0), g.flatten(0, -2).sum(0)
        scaled = g * weight
        along = (scaled * u).mean(-1, keepdim=True)
        dx = (scaled - scaled.mean(-1, keepdim=True)).addcmul_(u, along, value=-1).mul_(r)
        return dx.to(x.dtype), dw.to(weight.dtype), db.to(ctx.dtype), None


def widened(x: Tensor) -> Tensor:
    """In fp32, or fp64 if it is so already."""
    return x if x.dtype == torch.float64 else x.float()
