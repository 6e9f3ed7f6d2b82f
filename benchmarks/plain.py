"""The same model and the same loop, as one would write them in plain PyTorch for one device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.data.batches import Batch

Logits = Callable[[Tensor], Tensor]  # token ids [b, s] to [b, s, V]


class Attention(nn.Module):
    """Causal self-attention over grouped heads, rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        h, d = shape.hidden, shape.head_dim
        self.head_dim, self.grouped = d, shape.heads != shape.kv_heads
        self.q = nn.Linear(h, shape.heads * d, bias=False)
        self.k = nn.Linear(h, shape.kv_heads * d, bias=False)
        self.v = nn.Linear(h, shape.kv_heads * d, bias=False)
        self.o = nn.Linear(shape.heads * d, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o(y.transpose(1, 2).flatten(2))


def rotate_half(x: Tensor) -> Tensor:
    """Pairs (a, b), half a head apart, to (-b, a)."""
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


class MLP(nn.Module):
    """SwiGLU between two projections."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Parameters carry the names that Phalanx gives them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, seq: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        rates = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(seq), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [b, s] to logits [b, s, V]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Loop:
    """Takes steps: accumulate, clip, AdamW with decay on matrices only, warm-up.

    Args:
        model: its parameters are trained.
        logits: how it computes; by default the model itself.
        recipe: of the run it is compared with.
        size: sequences per micro-batch.
        bf16: matrix products in bf16, under autocast.
        unsynchronized: a context for all micro-batches but the last.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        size: int,
        *,
        logits: Logits | None = None,
        bf16: bool = False,
        unsynchronized: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model, self.recipe, self.size = model, recipe, size
        self.logits, self.bf16 = logits or model, bf16
        self.unsynchronized = unsynchronized
        self.parameters = list(model.parameters())
        self.optimizer = adamw(self.parameters, recipe)

    def step(self, step: int, batch: Batch) -> float:
        """The mean loss of the batch before the update."""
        self.optimizer.zero_grad()
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        pairs = list(zip(tokens.split(self.size), targets.split(self.size), strict=True))
        losses = []
        for x, y in pairs[:-1]:
            with self.unsynchronized():
                losses.append(self._backward(x, y, len(pairs)))
        losses.append(self._backward(*pairs[-1], len(pairs)))
        nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_at(step)
        self.optimizer.step()
        return torch.stack(losses).sum().item()

    def _backward(self, tokens: Tensor, targets: Tensor, count: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.logits(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / count
        loss.backward()
        return loss.detach()


def adamw(parameters: Sequence[nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """AdamW in one fused call, with decay on matrices only."""
    vectors = [p for p in parameters if p.dim() < 2]
    matrices = [p for p in parameters if p.dim() >= 2]
    return torch.optim.AdamW(
        [
            {"params": vectors, "weight_decay": 0.0},
            {"params": matrices, "weight_decay": recipe.weight_decay},
        ],
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        fused=True,
    )
