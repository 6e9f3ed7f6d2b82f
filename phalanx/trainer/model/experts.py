"""A mixture of experts: a router sends each token to a few of many MLPs; some it always visits.

Sources: Jiang et al. 2024 (arXiv:2401.04088), section 2.1, for softmax routing; DeepSeek-V3
(arXiv:2412.19437), section 2.1.2, for sigmoid routing among groups, shared experts and both ways
to balance.

Shapes: s sequence, b micro-batch, h hidden, E experts, K experts per token, f width of an expert;
s/t and f/t where a rank holds only its part.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.trainer.engine.saved import SavedTensors
from phalanx.trainer.engine.weight_gradients import WeightGradients
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.layers import Projection, activate
from phalanx.trainer.model.parameters import Declared, Init
from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.ops.kernels import grouped_outer, grouped_times, widened
from phalanx.trainer.parallel.expert import ExpertParallel
from phalanx.trainer.parallel.tensor import TensorParallel


class Routing(NamedTuple):
    """What a router decided.

    Attributes:
        chosen: int64 [s, b, K].
        weights: fp32 or wider [s, b, K].
        kept: bool [s, b, K], false where a token is padding or an expert is full; None where
            all are kept.
    """

    chosen: Tensor
    weights: Tensor
    kept: Tensor | None


class Router(Declared):
    """Scores every expert for every token and chooses K of them, in fp32 or wider.

    Every tensor-parallel rank routes the whole sequence. What it gives back through the weights
    of its part of the experts is a part of the gradient, so the router's own is one too.

    Attributes:
        bias: fp64 [E], added to affinities where experts are chosen and nowhere else.
        watch: is told whom a micro-batch chose: int64 [s, b, K].
    """

    weight: nn.Parameter

    def __init__(self, prefix: str, shape: ModelShape, recipe: Recipe, tp: TensorParallel) -> None:
        super().__init__(prefix)
        self.shape, self.recipe, self.gradients = shape, recipe, tp.gradients
        self.share = recipe.balance_loss / recipe.batch / tp.group.size
        needs_tp_reduce = tp.group.size > 1
        self.declare("weight", (shape.experts, shape.hidden), needs_tp_reduce=needs_tp_reduce)
        self.bias = torch.zeros(shape.experts, dtype=torch.float64)
        self.watch: Callable[[MicroBatch, Tensor], None] = lambda *_: None
        self._seen = torch.zeros(shape.experts + 1, dtype=torch.float64)

    def forward(self, x: Tensor, batch: MicroBatch) -> Routing:
        """Route [s, b, h]; where nothing is learned no expert is full, and no loss balances.

        Args:
            x: the dtype of computation, the same on every tensor-parallel rank.
            batch: says which tokens are padding, and which ranks hold the rest of the sequences,
                whose visits count too; its loss scale is that of the balance loss.
        """
        learns = torch.is_grad_enabled()
        capacity = self.recipe.capacity if learns else 0.0
        share = self.share * batch.loss_scale if learns else 0.0
        logits = cast(Tensor, apply(_WideProduct, self.gradients, x, self.weight))
        affinities = self._affinities(logits)
        with torch.no_grad():
            chosen = self._choose(affinities)
            self.watch(batch, chosen)
            visits = torch.zeros_like(affinities).scatter_(-1, chosen, 1.0)
            visits *= (batch.places < batch.seq)[:, None, None]
            so_far, total = visits, visits
            if share or capacity:
                so_far, total = batch.context.sums(visits, "expert visits")
            kept = self._kept(visits, so_far, capacity, batch)
        weights = affinities.gather(-1, chosen)
        if self.shape.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.shape.routed_scale != 1.0:
            weights = weights * self.shape.routed_scale
        loss = self._balance(affinities, total, batch) if share else None
        routing = Routing(chosen, weights, None if kept is None else kept.gather(-1, chosen))
        counts = _counts(visits, kept)
        weights = cast(Tensor, apply(_Learn, weights, loss, share, self._seen, counts))
        return routing._replace(weights=weights)

    def place(self, device: torch.device) -> None:
        """Put what is not a parameter on a device."""
        self.bias, self._seen = self.bias.to(device), self._seen.to(device)

    def take_seen(self) -> Tensor:
        """Tokens that chose each expert since the last call, and rows that were dropped: [E + 1].

        A micro-batch counts when it is learned from.
        """
        seen, self._seen = self._seen, torch.zeros_like(self._seen)
        return seen

    def _affinities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.shape.routing == "softmax" else logits.sigmoid()

    def _choose(self, affinities: Tensor) -> Tensor:
        """The K best experts of the best groups; of equals the first."""
        scores = affinities + self.bias.to(affinities)
        groups, kept = self.shape.expert_groups, self.shape.groups_kept
        if kept < groups:
            grouped = scores.unflatten(-1, (groups, -1))
            best = grouped.topk(self.shape.group_best, -1).values.sum(-1)
            stays = torch.zeros_like(best).scatter_(-1, _first(best, kept), 1.0).bool()
            scores = grouped.where(stays.unsqueeze(-1), -torch.inf).flatten(-2)
        return _first(scores, self.shape.top_k)

    def _kept(
        self, visits: Tensor, so_far: Tensor, capacity: float, batch: MicroBatch
    ) -> Tensor | None:
        """Which visits happen: of real tokens, and the first of a sequence that fit an expert.

        Each sequence has places of its own, so that what is dropped does not depend on how the
        batch is cut; Lepikhin et al. 2020 (arXiv:2006.16668), section 2.2, call it a group.
        """
        if capacity:
            even = batch.seq * self.shape.top_k / self.shape.experts
            return visits.bool() & (so_far <= math.ceil(capacity * even))
        padded = len(visits) * batch.context.group.size > batch.seq
        return visits.bool() if padded else None

    def _balance(self, affinities: Tensor, total: Tensor, batch: MicroBatch) -> Tensor:
        """Sum over sequences of sum over experts of f P (DeepSeek-V3, equations 17 to 20).

        f is an expert's share of the visits of a sequence over an even share, P its mean share of
        the affinities of a token. Of P a rank adds up what its own tokens say.
        """
        f = total * (self.shape.experts / (self.shape.top_k * batch.seq))
        shares = affinities
        if self.shape.routing == "sigmoid":
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        real = (batch.places < batch.seq).to(f)
        return (torch.einsum("sbe,s->be", shares, real) * f).sum() / batch.seq


def _first(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` largest along the last dim; of equals the first, on any device."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


class _WideProduct(torch.autograd.Function):
    """x w^T in fp32 or wider, whatever the dtype of its inputs; keeps x as it is."""

    @staticmethod
    def forward(ctx: Any, gradients: WeightGradients, x: Tensor, weight: Tensor) -> Tensor:
        ctx.gradients, ctx.parameter = gradients, weight
        ctx.save_for_backward(x, weight)
        return F.linear(widened(x), widened(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        rows = grads[0].flatten(0, -2)
        dx = (rows @ widened(weight)).view_as(x).to(x.dtype)
        return None, dx, *ctx.gradients.finish(_WideWork(ctx.parameter, rows, x))


class _WideWork:
    """The gradient of a matrix that is multiplied in fp32 or wider: g^T x."""

    def __init__(self, weight: Tensor, g: Tensor, x: Tensor) -> None:
        self.weights, self.g, self.x = (weight,), g, x

    def start(self) -> None:
        """Send nothing: both factors are here."""

    def finish(self) -> tuple[Tensor, ...]:
        """Multiply."""
        grad = self.g.t() @ widened(self.x).flatten(0, -2)
        return (grad.to(self.weights[0].dtype),)


def _counts(visits: Tensor, kept: Tensor | None) -> Tensor:
    """Visits of each expert, and after them how many were dropped: int64 [E + 1]."""
    experts = visits.sum((0, 1), dtype=torch.int64)
    happen = experts.sum() if kept is None else kept.sum()
    return torch.cat([experts, (experts.sum() - happen).view(1)])


class _Learn(torch.autograd.Function):
    """Passes `x` on; its backward also sends `share` into a loss that nothing else sees.

    And it adds the counts to `seen`: in backward, since recomputation and validation, which go
    forward too, are not to count.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor | None, share: float, seen: Tensor, counts: Tensor
    ) -> Tensor:
        ctx.share, ctx.loss, ctx.seen, ctx.counts = share, loss, seen, counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.seen += ctx.counts
        loss = None if ctx.loss is None else torch.full_like(ctx.loss, ctx.share)
        return grads[0], loss, None, None, None


class ExpertMatrices(Declared):
    """One matrix [n_out, n_in] for each expert, each cut by columns or rows over tp."""

    weight: nn.Parameter

    def __init__(self, prefix: str, experts: int, sizes: tuple[int, int], init: Init) -> None:
        super().__init__(prefix)
        n_in, n_out = sizes
        tp_dim = 2 if init == "residual" else 1
        self.declare("weight", (experts, n_out, n_in), tp_dim=tp_dim, expert_dim=0, init=init)


class RoutedExperts(nn.Module):
    """The experts of one layer, on the ranks along ep."""

    def __init__(
        self, prefix: str, shape: ModelShape, ep: ExpertParallel, gradients: WeightGradients
    ) -> None:
        super().__init__()
        self.ep, self.gradients = ep, gradients
        self.activate = partial(activate, shape.activation)
        self.experts = shape.experts
        E, h, f = shape.experts, shape.hidden, shape.expert_width
        gated = shape.is_gated
        self.gate = ExpertMatrices(f"{prefix}.gate", E, (h, f), "normal") if gated else None
        self.up = ExpertMatrices(f"{prefix}.up", E, (h, f), "normal")
        self.down = ExpertMatrices(f"{prefix}.down", E, (f, h), "residual")

    def forward(self, x: Tensor, routing: Routing, saved: SavedTensors) -> Tensor:
        """[s, b, h] to this tensor-parallel rank's part of the sum, [s, b, h].

        Every rank along ep takes part, with its own tokens.

        Args:
            x: the dtype of computation, the same on every tensor-parallel rank.
            routing: of these tokens.
            saved: says whether the activation function runs again in backward.
        """
        plan = self.ep.plan(routing.chosen, routing.kept, self.experts)
        rows = self.ep.dispatch(x, plan)
        stacks = [self.up] if self.gate is None else [self.gate, self.up]
        wide = self._products(rows, plan.counts, *stacks)
        (y,) = saved.run("activation", self.activate, *wide)
        (y,) = self._products(y, plan.counts, self.down)
        return self.ep.combine(y, routing.weights, plan)

    def _products(
        self, rows: Tensor, counts: list[int], *stacks: ExpertMatrices
    ) -> tuple[Tensor, ...]:
        weights = [stack.weight for stack in stacks]
        return cast(tuple[Tensor, ...], apply(_Grouped, self.gradients, counts, rows, *weights))


class _Grouped(torch.autograd.Function):
    """Rows [R, n_in] times a matrix of their own expert; several [E, n_out, n_in] at once."""

    @staticmethod
    def forward(
        ctx: Any, gradients: WeightGradients, counts: list[int], rows: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.counts, ctx.parameters = gradients, counts, weights
        ctx.save_for_backward(rows, *weights)
        return tuple(grouped_times(rows, w, counts) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = cast(tuple[Tensor, ...], ctx.saved_tensors)
        counts = cast(list[int], ctx.counts)
        dx = grouped_times(grads[0], weights[0].transpose(1, 2), counts)
        for g, w in zip(grads[1:], weights[1:], strict=True):
            dx += grouped_times(g, w.transpose(1, 2), counts)
        work = _GroupedWork(ctx.parameters, counts, grads, rows)
        return None, None, dx, *ctx.gradients.finish(work)


class _GroupedWork:
    """The gradients of experts: g^T x over the rows of each; zero for an expert without any."""

    def __init__(
        self, weights: tuple[Tensor, ...], counts: list[int], grads: tuple[Tensor, ...], x: Tensor
    ) -> None:
        self.weights, self.counts, self.grads, self.x = weights, counts, grads, x

    def start(self) -> None:
        """Send nothing: rows and gradients are here."""

    def finish(self) -> tuple[Tensor, ...]:
        """Multiply."""
        return tuple(grouped_outer(g, self.x, self.counts) for g in self.grads)


class SharedExperts(nn.Module):
    """Experts that every token visits, side by side as one MLP of their width together."""

    def __init__(self, prefix: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.activate = tp, partial(activate, shape.activation)
        h, f = shape.hidden, shape.shared_experts * shape.expert_width
        gated = shape.is_gated
        self.gate = Projection(f"{prefix}.gate", (h, f), "out", tp) if gated else None
        self.up = Projection(f"{prefix}.up", (h, f), "out", tp)
        self.down = Projection(f"{prefix}.down", (f, h), "in", tp)

    def forward(self, x: Tensor, saved: SavedTensors) -> Tensor:
        """[s, b, h] to this tensor-parallel rank's part of the sum, [s, b, h].

        Args:
            x: the dtype of computation, the same on every tensor-parallel rank.
            saved: says whether first products and activation function run again in backward.
        """
        wide = saved.run("mlp", self._widen, x)
        (y,) = saved.run("activation", self.activate, *wide)
        return self.tp.product(y, self.down)

    def _widen(self, x: Tensor) -> list[Tensor]:
        """[s, b, h] to the inputs of the activation function, [s, b, f/t] each."""
        inputs = [self.up] if self.gate is None else [self.gate, self.up]
        return [self.tp.product(x, layer) for layer in inputs]


class Experts(nn.Module):
    """What stands in the place of a block's MLP: router, routed experts, shared experts.

    All three see the whole sequence, gathered once, and their parts are summed once. How many
    rows an expert gets is known only at run time: the compiler leaves all of it alone.
    """

    def __init__(
        self,
        prefix: str,
        shape: ModelShape,
        recipe: Recipe,
        tp: TensorParallel,
        ep: ExpertParallel,
    ) -> None:
        super().__init__()
        self.tp, self.saved = tp, SavedTensors()
        self.router = Router(f"{prefix}.router", shape, recipe, tp)
        self.routed = RoutedExperts(f"{prefix}.experts", shape, ep, tp.gradients)
        shared = SharedExperts(f"{prefix}.shared", shape, tp) if shape.shared_experts else None
        self.shared = shared

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[s/t, b, h] to [s/t, b, h].

        Args:
            x: the dtype of computation, normalized; s/t is s without sequence parallelism.
            batch: for the router.
        """
        whole = self.tp.whole(x)
        if self.tp.sequence:
            self.saved.forget("norms", [whole], self._gather, x)
        y = self.routed(whole, self.router(whole, batch), self.saved)
        if self.shared is not None:
            y = y + self.shared(whole, self.saved)
        return self.tp.sum(y)

    def _gather(self, x: Tensor) -> Tensor:
        """The whole sequence once more, for backward."""
        whole, pending = self.tp.gather_sequence(x, "tp input again")
        pending.wait()
        return whole
