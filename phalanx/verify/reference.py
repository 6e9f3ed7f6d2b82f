"""The update that one impossibly large device would take, in plain PyTorch.

Nothing here is shared with the trainer but the declarations of the parameters, their initial
values, and the definition of dropout's mask: one process, the whole batch, autograd, and torch's
own AdamW, one tensor per parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.batches import IGNORED, Batch, Stream
from phalanx.train.model.inventory import declarations
from phalanx.train.parameters import Declaration, Initial, initial_values, key_of, uniform_at
from phalanx.train.precision.dtypes import Precision


@dataclass(frozen=True)
class ReferenceStep:
    """What one step did, by global parameter name: loss, norm before clipping, tensors after.

    A step whose norm is not finite moved nothing.
    """

    loss: float
    grad_norm: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference_steps(run: Run, stream: Stream, steps: int) -> list[ReferenceStep]:
    """Take `steps` updates on the whole global batch."""
    precision = Precision.named(run.layout.precision, torch.device("cpu"))
    recipe = run.recipe
    initial = Initial(recipe.seed, recipe.init_std, run.model.layers)
    declared = {d.name: d for d in declarations(run.model)}
    master = {
        name: initial_values(d, d.box(1, 0), initial).to(precision.master).requires_grad_()
        for name, d in declared.items()
    }
    optimizer = _optimizer(recipe, declared, master)
    done: list[ReferenceStep] = []
    factor = _LossScale(precision.compute == torch.float16)
    for step in range(steps):
        batch = stream.batch(step, range(recipe.batch))
        optimizer.zero_grad()
        loss = _loss(run, _cast(master, precision.compute), batch, step)
        (loss * factor.value).backward()
        for w in master.values():
            w.grad = _grad(w) / factor.value
        grads = {name: _grad(w) for name, w in master.items()}
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g, recipe.clip_norm) for g in grads.values()]),
            recipe.clip_norm,
        )
        if recipe.clip and norm > recipe.clip:
            for w, g in zip(master.values(), grads.values(), strict=True):
                w.grad = g * (recipe.clip / norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(factor.updates)
        if factor.accepts(loss, norm):
            optimizer.step()
        weights = {name: w.detach().clone() for name, w in master.items()}
        done.append(ReferenceStep(loss.item(), norm.item(), grads, weights))
    return done


class _LossScale:
    """The dynamic loss scale of fp16 (torch.amp.GradScaler), and how many steps it accepted."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic, self.value, self.streak, self.updates = dynamic, 65536.0, 0, 0
        if not dynamic:
            self.value = 1.0

    def accepts(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether a step may move the weights; what the next one's scale is follows from it."""
        if not torch.isfinite(loss + norm):
            self.value, self.streak = self.value / (2 if self.dynamic else 1), 0
            return False
        self.updates, self.streak = self.updates + 1, self.streak + 1
        if self.dynamic and self.streak % 2000 == 0:
            self.value *= 2
        return True


def _grad(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()


def _cast(master: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: w.to(dtype) for name, w in master.items()}


def _optimizer(
    recipe: Recipe, declared: Mapping[str, Declaration], master: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [master[name] for name, d in declared.items() if d.decays == decays],
            "weight_decay": recipe.weight_decay if decays else 0.0,
        }
        for decays in (False, True)
    ]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1.0, foreach=False)
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=recipe.eps, foreach=False)


def _loss(run: Run, w: Mapping[str, Tensor], batch: Batch, step: int) -> Tensor:
    """Mean loss over all valid tokens of the batch."""
    shape, recipe = run.model, run.recipe
    model = _Model(shape, recipe, w, step)
    logits = model.logits(batch)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    targets = torch.from_numpy(batch.targets).flatten()
    total = F.cross_entropy(
        wide.flatten(0, 1),
        targets,
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=recipe.label_smoothing,
    )
    return total / (targets != IGNORED).sum().clamp(min=1)


class _Model:
    """A decoder as its papers write it, batch first, [b, s, h]."""

    def __init__(
        self, shape: ModelShape, recipe: Recipe, weights: Mapping[str, Tensor], step: int
    ) -> None:
        self.shape, self.recipe, self.w, self.step = shape, recipe, weights, step

    def logits(self, batch: Batch) -> Tensor:
        positions = torch.from_numpy(batch.positions)
        x = self.w["embedding.weight"][torch.from_numpy(batch.tokens)]
        if self.shape.positions == "learned":
            x = x + self.w["positions.weight"][positions]
        x = self._drop(x, "embedding")
        mask = _may_look(batch)
        for i in range(self.shape.layers):
            block = f"blocks.{i}"
            a = self._attention(self._norm(x, f"{block}.attention_norm"), block, positions, mask)
            x = x + self._drop(a, f"{block}.attention")
            f = self._mlp(self._norm(x, f"{block}.mlp_norm"), f"{block}.mlp")
            x = x + self._drop(f, f"{block}.mlp")
        table = "embedding" if self.shape.tied else "head"
        return self._norm(x, "norm") @ self.w[f"{table}.weight"].t()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = _wide(x)
        centred = wide - wide.mean(-1, keepdim=True) if self.shape.norm == "layernorm" else wide
        y = self._rms(centred, name)
        return (y + self.w.get(f"{name}.bias", torch.zeros(()))).to(x.dtype)

    def _rms_norm(self, x: Tensor, name: str) -> Tensor:
        return self._rms(_wide(x), name).to(x.dtype)

    def _rms(self, wide: Tensor, name: str) -> Tensor:
        mean_square = wide.square().mean(-1, keepdim=True)
        return wide * (mean_square + self.shape.norm_eps).rsqrt() * self.w[f"{name}.weight"]

    def _attention(self, x: Tensor, block: str, positions: Tensor, mask: Tensor) -> Tensor:
        d = self.shape.head_dim
        q, k, v = (
            self._linear(x, f"{block}.attention.{n}").unflatten(-1, (-1, d)).transpose(1, 2)
            for n in "qkv"
        )
        if self.shape.qk_norm:
            q, k = (
                self._rms_norm(y, f"{block}.attention.{n}_norm") for n, y in (("q", q), ("k", k))
            )
        if self.shape.positions == "rope":
            q, k = self._rotate(q, positions), self._rotate(k, positions)
        repeats = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = (q @ k.transpose(-1, -2)) / d**0.5
        shares = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
        return self._linear((shares @ v).transpose(1, 2).flatten(2), f"{block}.attention.o")

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Pairs (i, i + d/2) as complex numbers, turned by position theta^(-2i/d)."""
        d = self.shape.head_dim
        rates = self.shape.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = positions[:, None, :, None] * rates
        pairs = torch.complex(x[..., : d // 2].double(), x[..., d // 2 :].double())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        up = self._linear(x, f"{name}.up")
        if self.shape.activation == "gelu":
            return self._linear(F.gelu(up, approximate="tanh"), f"{name}.down")
        return self._linear(F.silu(self._linear(x, f"{name}.gate")) * up, f"{name}.down")

    def _drop(self, x: Tensor, site: str) -> Tensor:
        rate = self.recipe.dropout
        if rate == 0.0:
            return x
        key = key_of(f"{self.recipe.seed}/dropout/{self.step}/{site}")
        index = torch.arange(x.numel()).view(x.shape)
        return x * ((uniform_at(key, index) >= rate) / (1 - rate)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _may_look(batch: Batch) -> Tensor:
    """Mask [b, s, s]: back, and within one's own document."""
    b, s = batch.tokens.shape
    causal = torch.ones(s, s, dtype=torch.bool).tril().expand(b, s, s)
    if batch.documents is None:
        return causal
    documents = torch.from_numpy(batch.documents)
    return causal & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
