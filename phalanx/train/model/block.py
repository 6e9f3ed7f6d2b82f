"""One transformer block: attention and an MLP or experts, each behind a norm, on a residual."""

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.train.model.attend import attend
from phalanx.train.model.batch import MicroBatch
from phalanx.train.model.experts import Experts
from phalanx.train.model.latent import LatentAttention
from phalanx.train.model.layers import (
    Dropout,
    Projection,
    head_norm,
    norm_layer,
    rotary_angles,
    rotate,
    swiglu,
)
from phalanx.train.parallel.expert import ExpertParallel, alone
from phalanx.train.parallel.tensor import TensorParallel


class Attention(nn.Module):
    """Causal self-attention over grouped heads (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__()
        self.shape, self.tp = shape, tp
        self.recompute_core = False
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        h, bias = shape.hidden, shape.has_qkv_bias
        self.q = Projection(f"{prefix}.q", (h, query), "out", tp, bias=bias)
        g = shape.kv_heads
        self.k = Projection(f"{prefix}.k", (h, key_value), "out", tp, bias=bias, pieces=g)
        self.v = Projection(f"{prefix}.v", (h, key_value), "out", tp, bias=bias, pieces=g)
        self.o = Projection(f"{prefix}.o", (query, h), "in", tp, bias=shape.bias)
        self.q_norm = head_norm(f"{prefix}.q_norm", shape) if shape.qk_norm else None
        self.k_norm = head_norm(f"{prefix}.k_norm", shape) if shape.qk_norm else None

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h]; this rank computes a/t of the heads.

        Where t > g, t/g neighbours hold the same key and value head.
        """
        q, k, v = (
            y.unflatten(-1, (-1, self.shape.head_dim))
            for y in self.tp.columns(x, self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.shape.positions == "rope":
            angles = rotary_angles(self.shape, batch.positions, x.dtype)
            q, k = rotate(q, angles), rotate(k, angles)
        y = attend(q, k, v, batch, recompute=self.recompute_core)
        return self.tp.rows(y, self.o)


class MLP(nn.Module):
    """SwiGLU or GELU between two projections."""

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        h, f, bias = shape.hidden, shape.ffn, shape.bias
        self.gate = (
            Projection(f"{prefix}.gate", (h, f), "out", tp, bias=bias)
            if shape.activation == "swiglu"
            else None
        )
        self.up = Projection(f"{prefix}.up", (h, f), "out", tp, bias=bias)
        self.down = Projection(f"{prefix}.down", (f, h), "in", tp, bias=bias)

    def forward(self, x: Tensor, _: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h]; this rank computes f/t of the width."""
        if self.gate is None:
            (up,) = self.tp.columns(x, self.up)
            return self.tp.rows(F.gelu(up, approximate="tanh"), self.down)
        gate, up = self.tp.columns(x, self.gate, self.up)
        return self.tp.rows(swiglu(gate, up), self.down)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        layer: int,
        shape: ModelShape,
        recipe: Recipe,
        tp: TensorParallel,
        ep: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        prefix = f"blocks.{layer}"
        self.attention_norm = norm_layer(f"{prefix}.attention_norm", shape, tp)
        kind = LatentAttention if shape.is_mla else Attention
        self.attention = kind(f"{prefix}.attention", shape, tp)
        self.mlp_norm = norm_layer(f"{prefix}.mlp_norm", shape, tp)
        self.mlp = (
            Experts(prefix, shape, recipe, tp, ep or alone())
            if shape.routes(layer)
            else MLP(f"{prefix}.mlp", shape, tp)
        )
        self.drop_attention, self.drop_mlp = (
            Dropout(recipe.dropout, recipe.seed, f"{prefix}.{site}", tp)
            for site in ("attention", "mlp")
        )

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h]."""
        x = x + self.drop_attention(self.attention(self.attention_norm(x), batch), batch)
        return x + self.drop_mlp(self.mlp(self.mlp_norm(x), batch), batch)
