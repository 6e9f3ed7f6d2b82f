"""Expert parallelism: tokens travel to the experts they chose, and the results travel back.

Rank i of e along ep holds experts [i E/e, (i+1) E/e) of every layer with experts. Each token is
sent to K experts, each a row of its own. Rows are put in the order of experts, so that those of
one expert lie together and one product per expert does all of them; no row is padded (Gale et al.
2022, arXiv:2211.15841). A rank takes part in every exchange, with no row too. Its cost twin is
phalanx/cost/messages/expert.py.

Shapes: T tokens, K experts per token, h hidden, R rows that leave, R' rows that arrive.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.ops.kernels import dot_each, weighed_sums
from phalanx.trainer.parallel.comm import Group, UnevenSplits
from phalanx.trainer.parallel.ledger import Ledger


class DispatchPlan(NamedTuple):
    """Which rows go where.

    Attributes:
        top_k: K.
        order: int64 [R], the rows in the order of experts; row `order[i]` is choice
            `order[i] % K` of token `order[i] // K`.
        send_splits, receive_splits: how many rows go to each rank along ep, and come from each.
        arranged: int64 [R'], the rows that arrive, which lie in the order of ranks, in that of
            experts; None where both are the same.
        counts: rows of each expert of this rank; they sum to R'.
    """

    top_k: int
    order: Tensor
    send_splits: list[int]
    receive_splits: list[int]
    arranged: Tensor | None
    counts: list[int]


class RowCounts(NamedTuple):
    """How many rows travel.

    Attributes:
        theirs: int64 [ranks, experts of this rank], that arrive.
        sent: for each rank along ep, rows for each of its experts.
        received: from each rank along ep, rows for each expert of this rank.
    """

    theirs: Tensor
    sent: list[list[int]]
    received: list[list[int]]


class ExpertParallel:
    """How one rank shares the experts of each layer with others.

    Attributes:
        group: the ranks along ep.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def plan(self, chosen: Tensor, kept: Tensor | None, experts: int) -> DispatchPlan:
        """Decide where rows go, and learn how many arrive: once for a layer and micro-batch.

        Args:
            chosen: int64 [..., K], experts.
            kept: bool [..., K], whether a token visits that expert; None where all do.
            experts: E.
        """
        expert = chosen.flatten()
        if kept is not None:
            expert = expert.where(kept.flatten(), experts)
        order = torch.argsort(expert, stable=True)
        theirs, sent, received = self.count(expert, experts)
        send, receive = ([sum(rank) for rank in side] for side in (sent, received))
        here = [sum(expert) for expert in zip(*received, strict=True)]
        arranged = _arranged(theirs, sum(receive))
        return DispatchPlan(chosen.shape[-1], order[: sum(send)], send, receive, arranged, here)

    def count(self, expert: Tensor, experts: int) -> RowCounts:
        """Count the rows that go to each expert, and learn how many come.

        Args:
            expert: int64 [rows], where each goes; `experts` where it goes nowhere.
            experts: E.
        """
        mine = torch.bincount(expert, minlength=experts)[:experts].view(self.group.size, -1)
        theirs = torch.empty_like(mine)
        self.group.all_to_all(theirs, mine, "rows per expert").wait()
        sent, received = torch.stack([mine, theirs]).tolist()
        return RowCounts(theirs, sent, received)

    def dispatch(self, x: Tensor, plan: DispatchPlan) -> Tensor:
        """Tokens [..., h] to the rows of this rank's experts [R', h], in order of experts.

        Args:
            x: this rank's tokens; every rank along ep calls it, one without tokens too.
            plan: made of the experts that these tokens chose.
        """
        return cast(Tensor, apply(_Dispatch, self, x, plan))

    def combine(self, y: Tensor, weights: Tensor, plan: DispatchPlan) -> Tensor:
        """Results [R', h] back to their tokens, each weighed by [..., K]: [..., h].

        Args:
            y: of the rows that `dispatch` gave, in their order; every rank along ep calls it.
            weights: fp32 or wider; they are rounded to the dtype of y.
            plan: the one of `dispatch`.
        """
        return cast(Tensor, apply(_Combine, self, y, weights, plan))

    def send_rows(self, rows: Tensor, plan: DispatchPlan, purpose: str) -> Tensor:
        """Send rows [R, h] to their experts: [R', h].

        Args:
            rows: those of this rank's tokens, in order of experts.
            plan: says how many go where.
            purpose: of the message, for the ledger.

        Returns:
            The rows of this rank's experts, in order of experts.
        """
        if self.group.size == 1:
            return rows
        out = rows.new_empty(sum(plan.receive_splits), rows.shape[-1])
        self.group.all_to_all(
            out, rows, purpose, UnevenSplits(plan.receive_splits, plan.send_splits, "go")
        ).wait()
        return out if plan.arranged is None else out.index_select(0, plan.arranged)

    def return_rows(self, rows: Tensor, plan: DispatchPlan, purpose: str) -> Tensor:
        """Send rows [R', h] back to where their tokens are: [R, h].

        Args:
            rows: those of this rank's experts, in order of experts.
            plan: the one they were sent by.
            purpose: of the message, for the ledger.

        Returns:
            The rows of this rank's tokens, in order of experts.
        """
        if self.group.size == 1:
            return rows
        if plan.arranged is not None:
            rows = torch.empty_like(rows).index_copy_(0, plan.arranged, rows)
        out = rows.new_empty(sum(plan.send_splits), rows.shape[-1])
        self.group.all_to_all(
            out, rows, purpose, UnevenSplits(plan.send_splits, plan.receive_splits, "come")
        ).wait()
        return out


def alone() -> ExpertParallel:
    """All experts on this rank."""
    return ExpertParallel(Group("expert", (0,), None, Ledger()))


def _arranged(counts: Tensor, rows: int) -> Tensor | None:
    """From the order of (rank, expert) to that of (expert, rank), given rows [ranks, experts]."""
    ranks, experts = counts.shape
    if min(ranks, experts) == 1:
        return None
    expert = torch.arange(experts, device=counts.device).repeat(ranks)
    of_rows = expert.repeat_interleave(counts.flatten(), output_size=rows)
    return torch.argsort(of_rows, stable=True)


class _Dispatch(torch.autograd.Function):
    """A row is a copy of its token; backward adds up the gradients of a token's K copies."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, x: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.ep, ctx.plan, ctx.shape = ep, plan, x.shape
        rows = x.flatten(0, -2).index_select(0, plan.order // plan.top_k)
        return ep.send_rows(rows, plan, "tokens")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        rows = ctx.ep.return_rows(grads[0].contiguous(), ctx.plan, "token gradients")
        tokens = ctx.shape[:-1].numel()
        return None, _by_token(rows, tokens, ctx.plan).sum(1).view(ctx.shape), None


class _Combine(torch.autograd.Function):
    """y_t = sum over k of w_tk times the row of (t, k); a row that was dropped is zero."""

    @staticmethod
    def forward(
        ctx: Any, ep: ExpertParallel, y: Tensor, weights: Tensor, plan: DispatchPlan
    ) -> Tensor:
        w = weights.to(y.dtype).flatten(0, -2)
        results = _by_token(ep.return_rows(y, plan, "expert results"), len(w), plan)
        ctx.ep, ctx.plan = ep, plan
        ctx.save_for_backward(results, weights)
        out = y.new_empty(*weights.shape[:-1], y.shape[-1])
        weighed_sums(results, w, out.flatten(0, -2))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, None]:
        results, weights = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        g, order = grads[0].flatten(0, -2), ctx.plan.order
        d_weights = dot_each(results, g).view(weights.shape).to(weights.dtype)
        w = weights.to(g.dtype).flatten().index_select(0, order)
        rows = g.index_select(0, order // ctx.plan.top_k).mul_(w.unsqueeze(-1))
        return None, ctx.ep.send_rows(rows, ctx.plan, "result gradients"), d_weights, None


def _by_token(rows: Tensor, tokens: int, plan: DispatchPlan) -> Tensor:
    """Rows [R, h] in the order of their tokens: [T, K, h], zero where nothing was sent."""
    shape = (tokens * plan.top_k, rows.shape[-1])
    every = len(rows) == shape[0]
    whole = rows.new_empty(shape) if every else rows.new_zeros(shape)
    whole.index_copy_(0, plan.order, rows)
    return whole.view(tokens, plan.top_k, rows.shape[-1])
