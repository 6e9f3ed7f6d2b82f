"""One transformer block: attention and an MLP or experts, each behind a norm, on a residual."""

from functools import partial

from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.trainer.engine.saved import SavedTensors
from phalanx.trainer.model.attend import Attending, attend, rule_of
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.experts import Experts
from phalanx.trainer.model.latent import LatentAttention
from phalanx.trainer.model.layers import (
    Dropout,
    LayerNorm,
    Projection,
    RMSNorm,
    activate,
    head_norm,
    norm_layer,
)
from phalanx.trainer.model.parameters import Declared
from phalanx.trainer.model.rotary import rotary_angles, rotate
from phalanx.trainer.parallel.expert import ExpertParallel, alone
from phalanx.trainer.parallel.tensor import TensorParallel


class Attention(nn.Module):
    """Causal self-attention over grouped heads (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel, layer: int = 0) -> None:
        super().__init__()
        self.shape, self.tp, self.rule = shape, tp, rule_of(shape, layer)
        self.saved = SavedTensors()
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        h, bias = shape.hidden, shape.has_qkv_bias
        self.q = Projection(f"{prefix}.q", (h, query), "out", tp, bias=bias)
        g = shape.kv_heads
        self.k = Projection(f"{prefix}.k", (h, key_value), "out", tp, bias=bias, tp_limit=g)
        self.v = Projection(f"{prefix}.v", (h, key_value), "out", tp, bias=bias, tp_limit=g)
        self.o = Projection(f"{prefix}.o", (query, h), "in", tp, bias=shape.bias)
        heads = {"q_norm": shape.heads, "k_norm": shape.kv_heads}
        self.q_norm, self.k_norm = (
            head_norm(f"{prefix}.{name}", shape, count) if shape.qk_norm else None
            for name, count in heads.items()
        )
        self.sinks = Sinks(f"{prefix}.sinks", shape) if shape.sinks else None

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h]; this rank computes a/t of the heads.

        Where t > g, t/g neighbours hold the same key and value head.

        Args:
            x: the dtype of computation, normalized; s/t is s without sequence parallelism.
            batch: says positions, documents, and which ranks hold the rest of the sequences.
        """
        q, k, v = self.tp.columns(x, self.q, self.k, self.v)
        angles: tuple[Tensor, ...] = ()
        if self.shape.positions == "rope":
            local = self.rule.window > 0
            angles = rotary_angles(self.shape, batch.positions, x.dtype, batch.seq, local=local)
        q, k = self._place(q, self.q_norm, angles), self._place(k, self.k_norm, angles)
        v = v.unflatten(-1, (-1, self.shape.head_dim))
        self.saved.forget("operators", [k], self._keys, x, *angles)
        sinks = None if self.sinks is None else self.sinks.weight
        how = Attending(self.rule, sinks, "core" in self.saved.parts)
        return self.tp.rows(attend(q, k, v, batch, how), self.o)

    def _keys(self, x: Tensor, *angles: Tensor) -> Tensor:
        """The keys alone, [s, b, g/t, d], as `forward` makes them."""
        (k,) = self.tp.columns(x, self.k)
        return self._place(k, self.k_norm, angles)

    def _place(self, x: Tensor, norm: RMSNorm | None, angles: tuple[Tensor, ...]) -> Tensor:
        """Queries or keys [s, b, a d] to [s, b, a, d], normed and turned as the model has it."""
        if norm is not None and self.shape.norm_all_heads:
            x, norm = norm(x), None
        x = x.unflatten(-1, (-1, self.shape.head_dim))
        x = x if norm is None else norm(x)
        return rotate(x, (angles[0], angles[1])) if angles else x


class Sinks(Declared):
    """A learned score of each head, which takes its share of attention and selects nothing."""

    weight: nn.Parameter

    def __init__(self, prefix: str, shape: ModelShape) -> None:
        super().__init__(prefix)
        self.declare("weight", (shape.heads,), tp_dim=0)


class MLP(nn.Module):
    """An activation function between two projections."""

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.saved = tp, SavedTensors()
        self.activate = partial(activate, shape.activation)
        h, f, bias = shape.hidden, shape.ffn, shape.bias
        self.gate = (
            Projection(f"{prefix}.gate", (h, f), "out", tp, bias=bias) if shape.is_gated else None
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
        (y,) = self.saved.run("activation", self.activate, *wide)
        return self.tp.rows(y, self.down)

    def _widen(self, x: Tensor) -> list[Tensor]:
        """[s/t, b, h] to the inputs of the activation function, [s, b, f/t] each."""
        return self.tp.columns(x, *([self.up] if self.gate is None else [self.gate, self.up]))

    def _widen_once(self, x: Tensor) -> Tensor:
        """The first of them alone."""
        return self.tp.columns(x, self.up if self.gate is None else self.gate)[0]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or norms after, or both branches at once."""

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
        self.parallel = shape.parallel_branches

        def norm(name: str, there: bool) -> RMSNorm | LayerNorm | None:
            return norm_layer(f"{prefix}.{name}", shape, tp) if there else None

        before, after = shape.norms != "after", shape.norms != "before"
        self.attention_norm = norm("attention_norm", before)
        kind = LatentAttention if shape.is_mla else Attention
        self.attention = kind(f"{prefix}.attention", shape, tp, layer)
        self.attention_post_norm = norm("attention_post_norm", after)
        self.mlp_norm = norm("mlp_norm", before)
        self.mlp = (
            Experts(prefix, shape, recipe, tp, ep or alone())
            if shape.routes(layer)
            else MLP(f"{prefix}.mlp", shape, tp)
        )
        self.mlp_post_norm = norm("mlp_post_norm", after)
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
        y = self.attention(self._normed(self.attention_norm, x), batch)
        y = y if self.attention_post_norm is None else self.attention_post_norm(y)
        between = x + self.drop_attention(y, batch)
        y = self.mlp(self._normed(self.mlp_norm, x if self.parallel else between), batch)
        y = y if self.mlp_post_norm is None else self.mlp_post_norm(y)
        return between + self.drop_mlp(y, batch)

    def _normed(self, norm: RMSNorm | LayerNorm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        (y,) = self.saved.run("norms", norm, x)
        return y
