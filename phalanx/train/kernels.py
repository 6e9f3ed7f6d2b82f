"""Two operations that torch does slowly on a CPU, done faster. On a GPU its own are used.

`benchmarks/gemm_share.py` measures what they gain; see docs/decisions/0006-products-on-cpu.md.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.train.autograd import apply

_ONEDNN = (
    torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
_WORTHWHILE = 1 << 23  # multiplications below which oneDNN's set-up costs more than it gains


def times(x: Tensor, w: Tensor) -> Tensor:
    """Multiply x w^T, without autograd: [..., n_in] and [n_out, n_in] to [..., n_out].

    In fp32 oneDNN multiplies faster than the BLAS that torch calls, except with `x` transposed.
    """
    large = x.numel() * w.shape[0] >= _WORTHWHILE
    if _ONEDNN and large and x.dtype == torch.float32 and x.device.type == "cpu":
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""))
    return F.linear(x, w)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight along the last dim, in fp32 or wider.

    Keeps x and one number per row for backward.
    """
    if x.device.type == "cpu":
        return cast(Tensor, apply(_RMSNorm, x, weight, eps))
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _RMSNorm(torch.autograd.Function):
    """With u = x r: dx = r (g w - u mean(g w u)), dw = sum of g u over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        r = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, r)
        return cast(Tensor, (wide * r).mul_(weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = cast(tuple[Tensor, Tensor, Tensor], ctx.saved_tensors)
        g, w, u = _wide(grads[0]), _wide(weight), _wide(x) * r
        products = g * u
        mean = (products @ w).div_(x.shape[-1]).unsqueeze(-1)
        dx = (g * w).addcmul_(u, mean, value=-1).mul_(r)
        dw = products.flatten(0, -2).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
