"""Expert parallelism: tokens travel to the experts they chose, and the results travel back.

Each token is sent to K experts, each a row of its own. Rows are put in the order of experts, so
that those of one expert lie together and one product per expert does all of them; no row is
padded (Gale et al. 2022, arXiv:2211.15841).

Shapes: T tokens, K experts per token, h hidden, R rows that leave, R' rows that arrive.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from phalanx.train.autograd import apply


class Plan(NamedTuple):
    """Which rows go where.

    Attributes:
        top_k: K.
        order: int64 [R], the rows in the order of experts; row `order[i]` is choice
            `order[i] % K` of token `order[i] // K`.
        counts: rows of each expert of this rank; they sum to R'.
    """

    top_k: int
    order: Tensor
    counts: list[int]


class ExpertParallel:
    """How one rank shares the experts of each layer with others.

    Attributes:
        experts: E, of a layer.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def plan(self, chosen: Tensor, kept: Tensor | None) -> Plan:
        """Decide where rows go, once for a layer and micro-batch.

        Args:
            chosen: int64 [..., K], experts.
            kept: bool [..., K], whether a token visits that expert; None where all do.
        """
        experts = chosen.flatten()
        if kept is not None:
            experts = experts.where(kept.flatten(), self.experts)
        counts = torch.bincount(experts, minlength=self.experts)[: self.experts]
        order = torch.argsort(experts, stable=True)[: int(counts.sum())]
        return Plan(chosen.shape[-1], order, counts.tolist())

    def dispatch(self, x: Tensor, plan: Plan) -> Tensor:
        """Tokens [..., h] to the rows of this rank's experts [R', h], in order of experts."""
        return cast(Tensor, apply(_Dispatch, x, plan))

    def combine(self, y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        """Results [R', h] back to their tokens, each weighed by [..., K]: [..., h]."""
        return cast(Tensor, apply(_Combine, y, weights, plan))


class _Dispatch(torch.autograd.Function):
    """A row is a copy of its token; backward adds up the gradients of a token's K copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan, ctx.shape = plan, x.shape
        return x.flatten(0, -2).index_select(0, plan.order // plan.top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        tokens = ctx.shape[:-1].numel()
        return _by_token(grads[0], tokens, ctx.plan).sum(1).view(ctx.shape), None


class _Combine(torch.autograd.Function):
    """y_t = sum over k of w_tk times the row of (t, k); a row that was dropped is zero."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
        w = weights.to(y.dtype).flatten(0, -2)
        results = _by_token(y, len(w), plan)
        ctx.plan = plan
        ctx.save_for_backward(results, weights)
        out = y.new_empty(*weights.shape[:-1], y.shape[-1])
        torch.bmm(w.unsqueeze(1), results, out=out.view(len(w), 1, -1))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        results, weights = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        g, order = grads[0].flatten(0, -2), ctx.plan.order
        d_weights = torch.bmm(results, g.unsqueeze(-1)).view(weights.shape).to(weights.dtype)
        w = weights.to(g.dtype).flatten().index_select(0, order)
        rows = g.index_select(0, order // ctx.plan.top_k).mul_(w.unsqueeze(-1))
        return rows, d_weights, None


def _by_token(rows: Tensor, tokens: int, plan: Plan) -> Tensor:
    """Rows [R, h] in the order of their tokens: [T, K, h], zero where nothing was sent."""
    shape = (tokens * plan.top_k, rows.shape[-1])
    every = len(rows) == shape[0]
    whole = rows.new_empty(shape) if every else rows.new_zeros(shape)
    whole.index_copy_(0, plan.order, rows)
    return whole.view(tokens, plan.top_k, -1)
