"""One transformer block: attention and an MLP or experts, each behind a norm, on a residual."""

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.trainer.engine.saved import SavedTensors
from phalanx.trainer.model.attend import attend
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.experts import Experts
from phalanx.trainer.model.latent import LatentAttention
from phalanx.trainer.model.layers import (
    Dropout,
    Projection,
    RMSNorm,
    head_norm,
    norm_layer,
    rotary_angles,
    rotate,
    swiglu,
)
from phalanx.trainer.parallel.expert import ExpertParallel, alone
from phalanx.trainer.parallel.tensor import TensorParallel


class Attention(nn.Module):
    """Causal self-attention over grouped heads (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__()
        self.shape, self.tp = shape, tp
        self.saved = SavedTensors()
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        h, bias = shape.hidden, shape.has_qkv_bias
        self.q = Projection(f"{prefix}.q", (h, query), "out", tp, bias=bias)
        g = shape.kv_heads
        self.k = Projection(f"{prefix}.k", (h, key_value), "out", tp, bias=bias, tp_limit=g)
        self.v = Projection(f"{prefix}.v", (h, key_value), "out", tp, bias=bias, tp_limit=g)
        self.o = Projection(f"{prefix}.o", (query, h), "in", tp, bias=shape.bias)
        self.q_norm = head_norm(f"{prefix}.q_norm", shape) if shape.qk_norm else None
        self.k_norm = head_norm(f"{prefix}.k_norm", shape) if shape.qk_norm else None

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h]; this rank computes a/t of the heads.

        Where t > g, t/g neighbours hold the same key and value head.

        Args:
            x: the dtype of computation, normalized; s/t is s without sequence parallelism.
            batch: says positions, documents, and which ranks hold the rest of the sequences.
        """
        q, k, v = (
            y.unflatten(-1, (-1, self.shape.head_dim))
            for y in self.tp.columns(x, self.q, self.k, self.v)
        )
        angles: tuple[Tensor, ...] = ()
        if self.shape.positions == "rope":
            angles = rotary_angles(self.shape, batch.positions, x.dtype)
        q, k = _place(q, self.q_norm, angles), _place(k, self.k_norm, angles)
        self.saved.forget("operators", [k], self._keys, x, *angles)
        y = attend(q, k, v, batch, recompute="core" in self.saved.parts)
        return self.tp.rows(y, self.o)

    def _keys(self, x: Tensor, *angles: Tensor) -> Tensor:
        """The keys alone, [s, b, g/t, d], as `forward` makes them."""
        (k,) = self.tp.columns(x, self.k)
        return _place(k.unflatten(-1, (-1, self.shape.head_dim)), self.k_norm, angles)


def _place(x: Tensor, norm: RMSNorm | None, angles: tuple[Tensor, ...]) -> Tensor:
    """Queries or keys [s, b, a, d], normed and turned by their positions, as the model has it."""
    x = x if norm is None else norm(x)
    return rotate(x, (angles[0], angles[1])) if angles else x


class MLP(nn.Module):
    """SwiGLU or GELU between two projections."""

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.saved = tp, SavedTensors()
        h, f, bias = shape.hidden, shape.ffn, shape.bias
        self.gate = (
            Projection(f"{prefix}.gate", (h, f), "out", tp, bias=bias)
            if shape.activation == "swiglu"
            else None
        )
        self.up = Projection(f"{prefix}.up", (h, f), "out", tp, bias=bias)
        self.down = Projection(f"{prefix}.down", (f, h), "in", tp, bias=bias)

    def forward(self, x: Tensor, _: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h]; this rank computes f/t of the width.

        Args:
            x: the dtype of computation, normalized; s/t is s without sequence parallelism.
        """
        wide = self.saved.run("mlp", self._widen, x)
        self.saved.forget("operators", wide[:1], self._widen_once, x)
        (y,) = self.saved.run("activation", self._activate, *wide)
        return self.tp.rows(y, self.down)

    def _widen(self, x: Tensor) -> list[Tensor]:
        """[s/t, b, h] to the inputs of the activation function, [s, b, f/t] each."""
        return self.tp.columns(x, *([self.up] if self.gate is None else [self.gate, self.up]))

    def _widen_once(self, x: Tensor) -> Tensor:
        """The first of them alone."""
        return self.tp.columns(x, self.up if self.gate is None else self.gate)[0]

    def _activate(self, *wide: Tensor) -> Tensor:
        if self.gate is None:
            return F.gelu(wide[0], approximate="tanh")
        return swiglu(wide[0], wide[1])


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
        self.saved = SavedTensors()
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

    def save_with(self, saved: SavedTensors) -> None:
        """Let `saved` decide what is saved for backward."""
        self.saved = self.attention.saved = self.mlp.saved = saved

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h].

        Args:
            x: the dtype of computation; s/t is s without sequence parallelism.
            batch: the micro-batch, for attention, routing and dropout.
        """
        (y,) = self.saved.run("norms", self.attention_norm, x)
        x = x + self.drop_attention(self.attention(y, batch), batch)
        (y,) = self.saved.run("norms", self.mlp_norm, x)
        return x + self.drop_mlp(self.mlp(y, batch), batch)
