"""The small layers that blocks are made of: projections, norms, activations, dropout."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.parameters import Declared, key_of, uniform_at
from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.ops.kernels import layer_norm, rms_norm
from phalanx.trainer.parallel.tensor import TensorParallel
from phalanx.trainer.precision.product import MatrixCut


class Projection(Declared):
    """A matrix [n_out, n_in], cut by columns ("out"), by rows ("in") or whole, perhaps with bias.

    A whole one multiplies what lies outside the matrix pairs, which sp cuts along the sequence.
    """

    weight: nn.Parameter

    def __init__(
        self,
        prefix: str,
        sizes: tuple[int, int],
        cut: MatrixCut,
        tp: TensorParallel,
        *,
        bias: bool = False,
        tp_limit: int = 0,
    ) -> None:
        """Declare it.

        Args:
            prefix: of its global name.
            sizes: n_in and n_out.
            cut: which dim tp divides.
            tp: the ranks.
            bias: whether it carries one.
            tp_limit: into how many parts it can be cut; 0 sets no limit.
        """
        super().__init__(prefix)
        self.product = tp.products(prefix, cut)
        n_in, n_out = sizes
        self.declare(
            "weight",
            (n_out, n_in),
            tp_dim={"out": 0, "in": 1, "whole": None}[cut],
            tp_limit=tp_limit,
            needs_tp_reduce=cut == "whole" and tp.sequence,
            init="residual" if cut == "in" else "normal",
        )
        self.bias: nn.Parameter | None
        if not bias:
            self.bias = None
        elif cut == "out":
            self.declare("bias", (n_out,), tp_dim=0, tp_limit=tp_limit, init="zeros")
        else:
            self.declare("bias", (n_out,), needs_tp_reduce=tp.sequence, init="zeros")


class RMSNorm(Declared):
    """x / rms(x) * weight, statistics in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    weight: nn.Parameter

    def __init__(self, prefix: str, width: int, eps: float, *, needs_tp_reduce: bool) -> None:
        """Declare one scale for each of `width` channels.

        Args:
            prefix: of its global name.
            width: n, of the last dim of what is normalized.
            eps: added to the mean square.
            needs_tp_reduce: this rank normalizes only a part of the sequence, or of the heads.
        """
        super().__init__(prefix)
        self.eps = eps
        self.declare("weight", (width,), needs_tp_reduce=needs_tp_reduce, init="ones")

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., n] along n."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(Declared):
    """(x - mean) / std * weight + bias, statistics in fp32 (Ba et al. 2016, arXiv:1607.06450)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__(prefix)
        self.eps = shape.norm_eps
        self.declare("weight", (shape.hidden,), needs_tp_reduce=tp.sequence, init="ones")
        self.declare("bias", (shape.hidden,), needs_tp_reduce=tp.sequence, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [s/t, b, h] along h."""
        return layer_norm(x, self.weight, self.bias, self.eps)


def norm_layer(prefix: str, shape: ModelShape, tp: TensorParallel) -> RMSNorm | LayerNorm:
    """The normalization that the model's family uses.

    Args:
        prefix: of its global name.
        shape: says which one, its width and its epsilon.
        tp: says whether a rank normalizes only a part of the sequence.
    """
    if shape.norm == "layernorm":
        return LayerNorm(prefix, shape, tp)
    return RMSNorm(prefix, shape.hidden, shape.norm_eps, needs_tp_reduce=tp.sequence)


def head_norm(prefix: str, shape: ModelShape, heads: int) -> RMSNorm:
    """The norm of each query or key over its d channels, with one scale for all heads.

    Or over the channels of all heads together (OLMo 2, arXiv:2501.00656, section 3.1).

    A rank normalizes its own heads, so its gradient is a part of the sum with sp and without.
    Sources: Dehghani et al. 2023 (arXiv:2302.05442), section 2.1; Qwen3 (arXiv:2505.09388),
    section 2.

    Args:
        prefix: of its global name.
        shape: gives d and epsilon.
        heads: how many there are.
    """
    width = heads * shape.head_dim if shape.norm_all_heads else shape.head_dim
    return RMSNorm(prefix, width, shape.norm_eps, needs_tp_reduce=True)


class Dropout:
    """Dropout whose mask is a function of (seed, step, site, sample, token, channel).

    So it is the same under every layout, and the same again when a block is recomputed.
    """

    def __init__(self, rate: float, seed: int, site: str, tp: TensorParallel) -> None:
        self.rate, self.seed, self.site, self.tp = rate, seed, site, tp

    def __call__(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """Drop elements of [s/t, b, h] and scale up the rest."""
        if self.rate == 0.0 or not torch.is_grad_enabled():
            return x
        return x * self._mask(x.shape[-1], batch).to(x.dtype)

    def _mask(self, h: int, batch: MicroBatch) -> Tensor:
        row = batch.samples * batch.seq + self.tp.my_sequence(batch.places).unsqueeze(-1)
        index = row.unsqueeze(-1) * h + torch.arange(h, device=row.device)
        key = key_of(f"{self.seed}/dropout/{batch.step}/{self.site}")
        return (uniform_at(key, index) >= self.rate) / (1 - self.rate)


def activate(kind: str, *wide: Tensor) -> Tensor:
    """What stands between the two products of an MLP.

    Args:
        kind: swiglu, geglu, gelu or gelu-erf, as a shape calls it.
        *wide: its inputs: gate and up of a gated one, else one.
    """
    match kind:
        case "swiglu":
            return swiglu(*wide)
        case "geglu":
            return cast(Tensor, apply(_GeGLU, *wide))
        case "gelu":
            return F.gelu(wide[0], approximate="tanh")
    return F.gelu(wide[0])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202); saves its two inputs and nothing else.

    Args:
        gate: any shape.
        up: of the same shape and dtype.
    """
    return cast(Tensor, apply(_SwiGLU, gate, up))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        d_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return d_gate, F.silu(gate).mul_(grads[0])


class _GeGLU(torch.autograd.Function):
    """gelu(gate) * up (Shazeer 2020, arXiv:2002.05202), with gelu by tanh, as Gemma has it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        d_gate = torch.ops.aten.gelu_backward(grads[0] * up, gate, approximate="tanh")
        return d_gate, F.gelu(gate, approximate="tanh").mul_(grads[0])
