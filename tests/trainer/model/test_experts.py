"""A router by itself: whom it chooses, how it weighs them, what it drops and counts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.experts import Router, Routing
from phalanx.trainer.parallel.comm import Group
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.tensor import TensorParallel

E = 8
SHAPE = ModelShape(hidden=E, heads=2, experts=E, top_k=2, routing="sigmoid")


def router(shape: ModelShape = SHAPE, recipe: Recipe | None = None) -> Router:
    """A router whose logits are its input."""
    alone = TensorParallel(Group("tensor", (0,), None, Ledger()), sequence=False)
    made = Router("router", shape, recipe or Recipe(), alone)
    made.weight = nn.Parameter(torch.eye(E, dtype=torch.float64))
    return made


def batch(seq: int, padded: int = 0, sequences: int = 1) -> MicroBatch:
    tokens = torch.zeros(padded or seq, sequences, dtype=torch.int64)
    samples = torch.arange(sequences)
    return MicroBatch(tokens, tokens, tokens, None, samples, seq=seq, step=0)


def route(made: Router, logits: Tensor, seq: int = 0) -> Routing:
    """Route [s, b, E]."""
    return made(logits, batch(seq or len(logits), len(logits), logits.shape[1]))


def logits_of(*best: int) -> Tensor:
    """One token that likes these experts, the first most."""
    logits = torch.full((1, 1, E), -4.0, dtype=torch.float64)
    for rank, expert in enumerate(best):
        logits[..., expert] = 4.0 - rank
    return logits


def test_the_best_experts_are_chosen() -> None:
    assert route(router(), logits_of(5, 2, 7)).chosen.flatten().tolist() == [5, 2]


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = torch.zeros(3, 1, E, dtype=torch.float64)
    assert route(router(), logits).chosen.flatten().tolist() == [0, 1] * 3


def test_an_expert_of_a_group_that_loses_is_not_chosen() -> None:
    shape = replace(SHAPE, top_k=4, expert_groups=4, groups_kept=2)
    assert shape.group_best == 2
    logits = torch.tensor([[[3.0, -9, 2, 1.9, 1.8, 1.7, -9, -9]]], dtype=torch.float64)
    chosen = route(router(shape), logits).chosen.flatten().tolist()
    assert chosen == [2, 3, 4, 5]  # the best expert stands alone in its group


def test_with_softmax_a_group_is_as_good_as_its_best_expert() -> None:
    shape = replace(SHAPE, routing="softmax", top_k=4, expert_groups=4, groups_kept=2)
    assert shape.group_best == 1
    logits = torch.tensor([[[3.0, -9, 2, 1.9, 1.8, 1.7, -9, -9]]], dtype=torch.float64)
    assert route(router(shape), logits).chosen.flatten().tolist() == [0, 2, 3, 1]


@pytest.mark.parametrize("routing", ["softmax", "sigmoid"])
def test_normalised_weights_add_up_to_the_scale(routing: str) -> None:
    shape = replace(SHAPE, routing=routing, routed_scale=2.5)  # type: ignore[arg-type]  # one of two
    weights = route(router(shape), torch.randn(5, 2, E, dtype=torch.float64)).weights
    torch.testing.assert_close(weights.sum(-1), torch.full_like(weights[..., 0], 2.5))


def test_weights_that_are_not_normalised_are_affinities() -> None:
    shape = replace(SHAPE, normalised=False)
    weights = route(router(shape), logits_of(5, 2)).weights.flatten()
    torch.testing.assert_close(weights, torch.tensor([4.0, 3.0], dtype=torch.float64).sigmoid())


def test_a_bias_changes_who_is_chosen_and_not_how_they_are_weighed() -> None:
    made = router(replace(SHAPE, normalised=False))
    made.bias[6] = 2.0
    found = route(made, logits_of(5, 2))
    assert found.chosen.flatten().tolist() == [6, 5]
    expected = torch.tensor([-4.0, 4.0], dtype=torch.float64).sigmoid()
    torch.testing.assert_close(found.weights.flatten(), expected)


def test_a_full_expert_turns_the_later_tokens_of_a_sequence_away() -> None:
    made = router(recipe=Recipe(capacity=2.0))
    logits = logits_of(5, 2).expand(4, 3, E)  # 4 tokens x 2 over 8 experts: 1 each, or 2 at most
    kept = route(made, logits).kept
    assert kept is not None
    assert kept[:2].all()
    assert not kept[2:].any()


def test_padding_visits_no_expert_and_counts_in_no_load() -> None:
    made = router()
    found = route(made, logits_of(5, 2).expand(4, 1, E).requires_grad_(), seq=3)
    assert found.kept is not None
    assert found.kept.all(-1).flatten().tolist() == [True, True, True, False]
    found.weights.sum().backward()
    assert made.take_seen().tolist() == [0, 0, 3, 0, 0, 3, 0, 0, 0]


def test_a_micro_batch_counts_once_and_only_when_it_is_learned_from() -> None:
    made = router(recipe=Recipe(capacity=1.0))
    logits = logits_of(5, 2).expand(4, 1, E).requires_grad_()
    with torch.no_grad():
        route(made, logits)
    assert made.take_seen().sum() == 0
    route(made, logits)  # as when it is recomputed
    route(made, logits).weights.sum().backward()
    assert made.take_seen().tolist() == [0, 0, 4, 0, 0, 4, 0, 0, 6]
    assert made.take_seen().sum() == 0


def test_the_balance_loss_is_its_formula() -> None:
    recipe = Recipe(balance_loss=0.3, batch=5)
    made = router(replace(SHAPE, routing="softmax"), recipe)
    logits = torch.randn(6, 2, E, dtype=torch.float64, requires_grad=True)
    route(made, logits).weights.sum().backward()  # normalised weights sum to a constant
    shares = logits.softmax(-1)
    visits = torch.zeros_like(shares).scatter_(-1, route(made, logits).chosen, 1.0)
    f, P = visits.sum(0) * E / (2 * 6), shares.mean(0)
    (expected,) = torch.autograd.grad((f * P).sum() * 0.3 / 5, logits)
    torch.testing.assert_close(logits.grad, expected)
