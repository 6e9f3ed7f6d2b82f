"""A device that rounds otherwise moves what it computes by a unit in the last place, no more."""

import pytest
import torch

from phalanx.oracle.chance import FLIPS, MovedByChance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_result_moves_by_at_most_a_unit_in_its_last_place(dtype: torch.dtype) -> None:
    x = torch.linspace(1.0, 1.9, 1000).to(dtype)
    with MovedByChance(0):
        moved = x * 1.0
    units = (moved.double() - x.double()).abs() / torch.finfo(dtype).eps
    assert 0.9 < units.max() <= 2.0  # a unit of the larger of two neighbours
    assert moved.dtype == dtype


def test_what_only_moves_numbers_about_does_not_change_them() -> None:
    x, places = torch.rand(50).bfloat16(), torch.randperm(50)
    counts = torch.arange(50)
    with MovedByChance(0):
        assert torch.equal(x[places], x.clone()[places])
        assert torch.equal(x.view(5, 10).t().reshape(-1), x.view(5, 10).t().flatten())
        assert torch.equal(counts.cumsum(0), torch.arange(50).cumsum(0))
        assert torch.equal(x.double() * 3, x.double() * 3)  # exact, beside shorter formats


def test_backward_moves_too() -> None:
    w = torch.ones(100, requires_grad=True)
    with MovedByChance(0):
        (w * torch.full((100,), 3.0)).sum().backward()
    assert w.grad is not None
    assert 0 < (w.grad - 3.0).abs().max() < 1e-5


def test_every_draw_is_another_and_the_same_again() -> None:
    x = torch.rand(50)
    found = []
    for seed in (1, 1, 2):
        with MovedByChance(seed):
            found.append(x * 2)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_some_of_what_is_kept_in_16_bits_goes_to_the_neighbour() -> None:
    x = torch.linspace(1.0, 1.9, 6400).bfloat16().float()
    moved = MovedByChance(0).neighbour(x, torch.bfloat16).bfloat16().float()
    spacing = torch.finfo(torch.bfloat16).eps
    assert 0.5 * FLIPS < (moved != x).float().mean() < 2 * FLIPS
    assert (moved - x).abs().max() <= 2 * spacing
