"""The update that one impossibly large device would take, in plain PyTorch.

Nothing here is shared with the trainer but the declarations of the parameters, their initial
values, and the definition of dropout's mask: one process, the whole batch, autograd, and torch's
own AdamW, one tensor per parameter.
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.batches import IGNORED, Batch, Stream
from phalanx.oracle.chance import MovedByChance
from phalanx.oracle.low_precision import Emulation
from phalanx.oracle.sixteen_bits import as_kept, narrow
from phalanx.trainer.model.init import init_source, router_biases
from phalanx.trainer.model.inventory import declarations
from phalanx.trainer.model.parameters import Declaration, key_of, uniform_at
from phalanx.trainer.precision.dtypes import Dtypes

Places = tuple[Tensor, bool]  # positions [b, s], and whether the layer has a window


@dataclass(frozen=True)
class ReferenceStep:
    """What one step did, by global parameter name.

    Attributes:
        loss: of the global batch.
        grad_norm: before clipping; a step where it is not finite moves nothing.
        grads, weights: of every parameter, the weights after the step.
        scores: of each router, by the name of its bias, what experts were chosen by, [b, s, E].
    """

    loss: float
    grad_norm: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    scores: dict[str, Tensor] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite, so that the weights may move."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Decisions:
    """What a layout decided where rounding may tip the balance, for the reference to follow.

    Attributes:
        routes: by step and name of a router's bias, the experts of each token: int64 [b, s, K].
        skipped: which steps it skipped.
    """

    routes: Mapping[tuple[int, str], Tensor]
    skipped: tuple[bool, ...]


def reference_steps(
    run: Run,
    stream: Stream,
    steps: int,
    decisions: Decisions | None = None,
    rounding: MovedByChance | None = None,
) -> list[ReferenceStep]:
    """Take updates on the whole global batch.

    Args:
        run: model, recipe and precision; of the layout only the size of a micro-batch, which some
            recipes of low precision scale by.
        stream: of batches.
        steps: how many updates.
        decisions: to follow, instead of its own.
        rounding: surrounds forward and backward, and rounds otherwise.
    """
    precision = Dtypes.named(run.layout.precision, torch.device("cpu"))
    recipe = run.recipe
    values = init_source(run)
    declared = {d.name: d for d in declarations(run.model)}
    master = {
        name: as_kept(values(d, d.box()), recipe).to(precision.master).requires_grad_()
        for name, d in declared.items()
    }
    optimizer = _optimizer(recipe, declared, master)
    biases = _first_biases(run)
    done: list[ReferenceStep] = []
    products = Emulation(precision.recipe, run.layout.mb)
    factor = _LossScale(precision.compute == torch.float16)
    for step in range(steps):
        batch = stream.batch(step, range(recipe.batch))
        optimizer.zero_grad()
        weights = {**_cast(master, precision.compute), **biases}
        model = _Model(run.model, recipe, weights, step, products, _routes(decisions, step))
        with rounding or nullcontext():
            loss, balance = _loss(model, batch)
            ((loss + balance) * factor.value).backward()
        products.end_step()
        for w in master.values():
            w.grad = _grad(w) / factor.value
        grads = {name: _grad(w) for name, w in master.items()}
        norm = _clip(recipe, master, grads)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(factor.updates)
        finite = bool(torch.isfinite(loss + norm))
        if factor.accepts(finite if decisions is None else not decisions.skipped[step]):
            optimizer.step()
            narrow(recipe, optimizer, master, factor.updates, rounding)
            for name, load in model.loads.items():
                away = load.double().mean() - load
                biases[name] = biases[name] + recipe.balance_speed * away.sign()
        weights = {name: w.detach().clone() for name, w in master.items()} | biases
        done.append(ReferenceStep(loss.item(), norm.item(), grads, weights, model.scores))
    return done


def _first_biases(run: Run) -> dict[str, Tensor]:
    """What evens out the load of experts, by name: zero, or what the run's folder has."""
    first, shape = router_biases(run), run.model
    none = torch.zeros(shape.experts, dtype=torch.float64)
    layers = filter(shape.routes, range(shape.layers))
    return {f"blocks.{i}.router.bias": first.get(i, none).clone() for i in layers}


def _routes(decisions: Decisions | None, step: int) -> dict[str, Tensor]:
    routes = {} if decisions is None else decisions.routes
    return {name: chosen for (at, name), chosen in routes.items() if at == step}


def _clip(recipe: Recipe, master: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Tensor:
    """The norm of the whole gradient; what the weights carry is scaled down to the limit."""
    norms = [torch.linalg.vector_norm(g, recipe.clip_norm) for g in grads.values()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), recipe.clip_norm)
    if recipe.clip and norm > recipe.clip:
        for name, g in grads.items():
            master[name].grad = g * (recipe.clip / norm)
    return norm


class _LossScale:
    """The dynamic loss scale of fp16 (torch.amp.GradScaler), and how many steps it accepted."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic, self.value, self.streak, self.updates = dynamic, 65536.0, 0, 0
        if not dynamic:
            self.value = 1.0

    def accepts(self, finite: bool) -> bool:
        """Whether a step may move the weights; what the next one's scale is follows from it."""
        if not finite:
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


def _loss(model: "_Model", batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean loss over all valid tokens of the batch, and what balances experts beside it."""
    recipe = model.recipe
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
    balance = recipe.balance_loss / recipe.batch * model.imbalance
    return total / (targets != IGNORED).sum().clamp(min=1), balance


class _Model:
    """A decoder as its papers write it, batch first, [b, s, h]."""

    def __init__(
        self,
        shape: ModelShape,
        recipe: Recipe,
        weights: Mapping[str, Tensor],
        step: int,
        products: Emulation,
        routes: Mapping[str, Tensor],
    ) -> None:
        self.shape, self.recipe, self.w, self.step = shape, recipe, weights, step
        self.products, self.routes = products, routes
        self.scores: dict[str, Tensor] = {}  # of experts, by the name of their bias
        self.imbalance = torch.zeros(())  # of experts, summed over sequences and layers
        self.loads: dict[str, Tensor] = {}  # visits of each expert, by the name of its bias

    def logits(self, batch: Batch) -> Tensor:
        positions = torch.from_numpy(batch.positions)
        x = self.w["embedding.weight"][torch.from_numpy(batch.tokens)]
        x = x * (self.shape.embedding_scale or 1.0)
        if self.shape.positions == "learned":
            x = x + self.w["positions.weight"][positions]
        x = self._drop(x, "embedding")
        mask = _may_look(batch)
        for i in range(self.shape.layers):
            block = f"blocks.{i}"
            a = self._attention(self._if_there(x, f"{block}.attention_norm"), i, positions, mask)
            a = self._if_there(a, f"{block}.attention_post_norm")
            after = x + self._drop(a, f"{block}.attention")
            y = self._if_there(x if self.shape.parallel_branches else after, f"{block}.mlp_norm")
            f = self._experts(y, block) if self.shape.routes(i) else self._mlp(y, f"{block}.mlp")
            x = after + self._drop(self._if_there(f, f"{block}.mlp_post_norm"), f"{block}.mlp")
        table = "embedding" if self.shape.tied else "head"
        logits = self._norm(x, "norm") @ self.w[f"{table}.weight"].t()
        return _capped(logits, self.shape.logit_cap)

    def _if_there(self, x: Tensor, name: str) -> Tensor:
        """A norm that some families have, and others have not."""
        return self._norm(x, name) if f"{name}.weight" in self.w else x

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = self.products.linear(x, self.w[f"{name}.weight"], name)
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

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

    def _attention(self, x: Tensor, layer: int, positions: Tensor, mask: Tensor) -> Tensor:
        shape, name, s = self.shape, f"blocks.{layer}.attention", x.shape[1]
        window = shape.window_of(layer)
        split = self._latent_heads if shape.is_mla else self._grouped_heads
        q, k, v = split(x, name, (positions, window > 0))
        scores = (q @ k.transpose(-1, -2)) * (shape.attention_scale or q.shape[-1] ** -0.5)
        scores = _capped(scores, shape.attention_cap)
        if window:
            mask = mask & torch.ones(s, s, dtype=torch.bool).triu(1 - window)
        scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
        if shape.sinks:  # one more thing to look at, which says nothing
            sinks = self.w[f"{name}.sinks.weight"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
        shares = scores.softmax(-1)[..., :s]
        return self._linear((shares @ v).transpose(1, 2).flatten(2), f"{name}.o")

    def _grouped_heads(self, x: Tensor, name: str, positions: Places) -> tuple[Tensor, ...]:
        counts = {"q": self.shape.heads, "k": self.shape.kv_heads, "v": self.shape.kv_heads}
        q, k, v = (self._heads(x, f"{name}.{n}", count) for n, count in counts.items())
        if self.shape.norm_all_heads:
            q, k = (
                _in_heads(self._rms_norm(_side_by_side(y), f"{name}.{n}_norm"), y.shape[1])
                for n, y in (("q", q), ("k", k))
            )
        elif self.shape.qk_norm:
            q, k = self._rms_norm(q, f"{name}.q_norm"), self._rms_norm(k, f"{name}.k_norm")
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        repeats = self.shape.heads // self.shape.kv_heads
        return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)

    def _latent_heads(self, x: Tensor, name: str, positions: Places) -> tuple[Tensor, ...]:
        """DeepSeek-V2 (arXiv:2405.04434), appendix C."""
        shape, a = self.shape, self.shape.heads
        if shape.q_lora_rank:
            c_q = self._rms_norm(self._linear(x, f"{name}.q_down"), f"{name}.q_norm")
            q = self._heads(c_q, f"{name}.q_up", a)
        else:
            q = self._heads(x, f"{name}.q", a)
        q_nope, q_rope = q.split([shape.qk_nope, shape.qk_rope], -1)
        c_kv = self._rms_norm(self._linear(x, f"{name}.kv_down"), f"{name}.kv_norm")
        k_nope, v = self._heads(c_kv, f"{name}.k_up", a), self._heads(c_kv, f"{name}.v_up", a)
        k_rope = self._linear(x, f"{name}.k_rope").unsqueeze(1).expand_as(q_rope)
        q = torch.cat([q_nope, self._rotate(q_rope, positions)], -1)
        return q, torch.cat([k_nope, self._rotate(k_rope, positions)], -1), v

    def _heads(self, x: Tensor, name: str, count: int) -> Tensor:
        """A product cut into heads, [b, a, s, d]."""
        return _in_heads(self._linear(x, name), count)

    def _rotate(self, x: Tensor, places: Places) -> Tensor:
        """Pairs (i, i + d/2) of the last d channels as complex numbers, turned by position."""
        if self.shape.positions != "rope":
            return x
        positions, local = places
        still, x = x.split([x.shape[-1] - self.shape.rotary_dim, self.shape.rotary_dim], -1)
        d = x.shape[-1]
        rates, factor = rates_by_the_papers(self.shape, self.recipe.seq, local=local)
        angles = positions[:, None, :, None] * torch.tensor(rates, dtype=torch.float64)
        pairs = torch.complex(x[..., : d // 2].double(), x[..., d // 2 :].double())
        turned = pairs * torch.polar(torch.full_like(angles, factor), angles)
        return torch.cat([still, turned.real.to(x.dtype), turned.imag.to(x.dtype)], -1)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        up, kind = self._linear(x, f"{name}.up"), self.shape.activation
        if kind in ("gelu", "gelu-erf"):
            how = "tanh" if kind == "gelu" else "none"
            return self._linear(F.gelu(up, approximate=how), f"{name}.down")
        gate = self._linear(x, f"{name}.gate")
        gate = F.gelu(gate, approximate="tanh") if kind == "geglu" else F.silu(gate)
        return self._linear(gate * up, f"{name}.down")

    def _experts(self, x: Tensor, block: str) -> Tensor:
        """Every expert computes every token, and most results are multiplied by zero."""
        shares = self._router(x, block).to(x.dtype)
        y = self._mlp(x, f"{block}.shared") if self.shape.shared_experts else torch.zeros_like(x)
        names = ("up", "down", *(["gate"] if self.shape.activation == "swiglu" else []))
        for e in range(self.shape.experts):
            one = {f"expert.{n}.weight": self.w[f"{block}.experts.{n}.weight"][e] for n in names}
            expert = _Model(self.shape, self.recipe, one, self.step, Emulation("", 1), {})
            y = y + shares[..., e, None] * expert._mlp(x, "expert")
        return y

    def _router(self, x: Tensor, block: str) -> Tensor:
        """Weight of every expert for every token, [b, s, E]; zero where it is not visited."""
        shape, wide = self.shape, torch.float64 if x.dtype == torch.float64 else torch.float32
        logits = x.to(wide) @ self.w[f"{block}.router.weight"].to(wide).t()
        affinity = logits.sigmoid() if shape.routing == "sigmoid" else logits.softmax(-1)
        bias = f"{block}.router.bias"
        self.scores[bias] = affinity.detach() + self.w[bias].to(wide)
        if bias in self.routes:
            chosen = torch.zeros_like(affinity).scatter(-1, self.routes[bias], 1.0)
        else:
            chosen = choose_experts(shape, self.scores[bias])
        self.loads[bias] = chosen.long().sum((0, 1))
        weights = affinity * chosen
        if shape.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        self.imbalance = self.imbalance + self._imbalance(affinity, chosen)
        return shape.routed_scale * weights * self._fits(chosen)

    def _imbalance(self, affinity: Tensor, chosen: Tensor) -> Tensor:
        """DeepSeek-V3 (arXiv:2412.19437), equations 17 to 20, summed over sequences."""
        share = affinity / affinity.sum(-1, keepdim=True)
        frequency = chosen.mean(1) * self.shape.experts / self.shape.top_k
        return (frequency * share.mean(1)).sum()

    def _fits(self, chosen: Tensor) -> Tensor:
        """One but for the visits of a sequence that come when the expert's places are taken."""
        if not self.recipe.capacity:
            return torch.ones_like(chosen)
        even = chosen.shape[1] * self.shape.top_k / self.shape.experts
        return (chosen.long().cumsum(1) <= math.ceil(self.recipe.capacity * even)).to(chosen.dtype)

    def _drop(self, x: Tensor, site: str) -> Tensor:
        rate = self.recipe.dropout
        if rate == 0.0:
            return x
        key = key_of(f"{self.recipe.seed}/dropout/{self.step}/{site}")
        index = torch.arange(x.numel()).view(x.shape)
        return x * ((uniform_at(key, index) >= rate) / (1 - rate)).to(x.dtype)


def rates_by_the_papers(shape: ModelShape, seq: int, *, local: bool) -> tuple[list[float], float]:
    """Radians per position of each pair of channels, one by one, and a factor on what is turned.

    Sources: Su et al. 2021 (arXiv:2104.09864); Peng et al. 2023 (arXiv:2309.00071), sections 3.1
    (NTK-aware), 3.2 (NTK by parts) and 3.4; Llama 3.1's reference code.

    Args:
        shape: gives d, theta and the scaling.
        seq: tokens of a sequence.
        local: the layer has a window, and perhaps a base of its own.
    """
    d, scaling, theta = shape.rotary_dim, shape.rope, shape.rope_theta
    if local and shape.local_theta:
        scaling, theta = type(scaling)(), shape.local_theta
    kind, factor, original = scaling.kind, scaling.factor, scaling.original
    if kind == "dynamic":
        longer = max(seq / original, 1.0)
        theta *= (factor * longer - factor + 1) ** (d / (d - 2))
    found = []
    for i in range(0, d, 2):
        rate = theta ** (-i / d)
        match kind:
            case "linear":
                rate /= factor
            case "llama3":
                wave = 2 * math.pi / rate
                if wave > original / scaling.low:
                    rate /= factor
                elif wave > original / scaling.high:
                    smooth = (original / wave - scaling.low) / (scaling.high - scaling.low)
                    rate = (1 - smooth) * rate / factor + smooth * rate
            case "yarn":
                border = [
                    d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
                    for turns in (scaling.fast, scaling.slow)
                ]
                if scaling.rounded:
                    border = [math.floor(border[0]), math.ceil(border[1])]
                low, high = max(border[0], 0), min(border[1], d - 1)
                ramp = min(max((i / 2 - low) / max(high - low, 0.001), 0), 1)
                rate = ramp * rate / factor + (1 - ramp) * rate
        found.append(rate)
    grown = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return found, (scaling.attention or grown) if kind == "yarn" else 1.0


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _in_heads(y: Tensor, count: int) -> Tensor:
    """[b, s, a d] to [b, a, s, d]."""
    return y.view(*y.shape[:-1], count, -1).transpose(1, 2)


def _side_by_side(y: Tensor) -> Tensor:
    """[b, a, s, d] to [b, s, a d]."""
    return y.transpose(1, 2).flatten(2)


def choose_experts(shape: ModelShape, scores: Tensor) -> Tensor:
    """One where a token visits an expert: its K best, within its best groups of experts.

    Args:
        shape: says how many, and which groups.
        scores: [b, s, E].
    """
    grouped = scores.unflatten(-1, (shape.expert_groups, -1))
    worth = grouped.sort(-1, descending=True).values[..., : shape.group_best].sum(-1)
    open_groups = _best(worth, shape.groups_kept).bool().unsqueeze(-1)
    return _best(grouped.masked_fill(~open_groups, -torch.inf).flatten(-2), shape.top_k)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _best(scores: Tensor, count: int) -> Tensor:
    """One at the `count` largest along the last dim, the first of equals, and zero elsewhere."""
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores).scatter(-1, order, 1.0)


def _may_look(batch: Batch) -> Tensor:
    """Mask [b, s, s]: back, and within one's own document."""
    b, s = batch.tokens.shape
    causal = torch.ones(s, s, dtype=torch.bool).tril().expand(b, s, s)
    if batch.documents is None:
        return causal
    documents = torch.from_numpy(batch.documents)
    return causal & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
