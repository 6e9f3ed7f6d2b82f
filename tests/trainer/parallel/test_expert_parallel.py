"""Experts spread over ranks, with routings that no router would choose."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.oracle.pool import RankPool
from phalanx.trainer.engine.saved import SavedTensors
from phalanx.trainer.engine.weight_gradients import WeightGradients
from phalanx.trainer.model.experts import RoutedExperts, Routing
from phalanx.trainer.parallel.comm import DirectGroup
from phalanx.trainer.parallel.expert import ExpertParallel, alone
from phalanx.trainer.parallel.ledger import Ledger

pytestmark = pytest.mark.ranks

E, K, H, TOKENS = 4, 2, 6, 5
SHAPE = ModelShape(hidden=H, heads=1, experts=E, top_k=K, moe_ffn=3)


def experts(ep: ExpertParallel) -> RoutedExperts:
    """The experts of one rank, drawn from the same numbers on every rank."""
    made = RoutedExperts("experts", SHAPE, ep, WeightGradients())
    generator = torch.Generator().manual_seed(0)
    for stack in (made.gate, made.up, made.down):
        assert stack is not None
        (declaration,) = stack.declarations.values()
        whole = torch.randn(declaration.shape, generator=generator, dtype=torch.float64)
        mine = whole.chunk(ep.group.size)[ep.group.index]
        stack.weight = nn.Parameter(mine.clone())
    return made


def tokens_of(rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens and weights of one rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(tokens, 1, H, generator=generator, dtype=torch.float64)
    return x, torch.rand(tokens, 1, K, generator=generator, dtype=torch.float64)


def visit(ep: ExpertParallel, rank: int, chosen: list[int], tokens: int) -> list[Tensor]:
    """Output, and gradients of tokens, weights and experts, if all tokens choose the same."""
    made = experts(ep)
    x, weights = (part.requires_grad_() for part in tokens_of(rank, tokens))
    same = torch.tensor(chosen).expand(tokens, 1, K)
    y = made(x, Routing(same, weights, None), SavedTensors())
    y.square().sum().backward()
    stacks = [stack.weight.grad for stack in (made.gate, made.up, made.down) if stack]
    found = [y.detach(), x.grad, weights.grad, *stacks]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def spread(chosen: list[int], counts: list[int]) -> list[Tensor]:
    """On each rank: the same over all ranks, of which each has so many tokens."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = DirectGroup("expert", range(ranks), dist.group.WORLD, Ledger())
    return visit(ExpertParallel(group), rank, chosen, counts[rank])


@pytest.mark.parametrize("counts", [[TOKENS, TOKENS], [TOKENS, 0], [0, 0]])
@pytest.mark.parametrize("chosen", [[0, 1], [3, 2], [0, 2]])
def test_experts_on_other_ranks_compute_what_they_would_here(
    ranks: RankPool, chosen: list[int], counts: list[int]
) -> None:
    found = ranks.run(2, spread, chosen, counts)
    expected = [visit(alone(), rank, chosen, tokens) for rank, tokens in enumerate(counts)]
    for rank in range(2):
        for mine, true in zip(found[rank][:3], expected[rank][:3], strict=True):
            torch.testing.assert_close(mine, true)
    for stack in range(3, 6):
        together = torch.cat([rank[stack] for rank in found])
        torch.testing.assert_close(together, expected[0][stack] + expected[1][stack])


def test_every_token_to_the_same_experts_leaves_the_others_a_gradient_of_zero(
    ranks: RankPool,
) -> None:
    first, second = ranks.run(2, spread, [0, 1], [TOKENS, TOKENS])
    assert all(grad.abs().sum() > 0 for grad in first[3:])
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in second[3:])
