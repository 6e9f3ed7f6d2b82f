import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.core.layout import share
from phalanx.trainer.model.parameters import (
    Box,
    Declaration,
    Declared,
    Initial,
    Share,
    declared_in,
    initial_values,
    key_of,
    uniform_at,
    uniform_values,
)

INITIAL = Initial(seed=3, std=0.02, layers=8)
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """A shape, and some box inside it."""
    shape = draw(SHAPES)
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, Box(offsets, sizes)


@given(boxes(), st.sampled_from(["normal", "residual", "ones", "zeros"]))
def test_a_part_starts_with_the_values_of_the_whole(
    drawn: tuple[tuple[int, ...], Box], init: str
) -> None:
    shape, box = drawn
    declaration = Declaration(name="w", shape=shape, init=init)
    whole = initial_values(declaration, declaration.box(), INITIAL)
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, offset, size)
    assert torch.equal(initial_values(declaration, box, INITIAL), whole)


@given(st.integers(1, 50), st.integers(1, 8))
def test_shares_cover_every_element_once_and_differ_by_one_at_most(total: int, parts: int) -> None:
    shares = [share(total, parts, i) for i in range(parts)]
    covered = [i for offset, size in shares for i in range(offset, offset + size)]
    assert covered == list(range(total))
    assert max(size for _, size in shares) - min(size for _, size in shares) <= 1


def test_initial_values_are_normal_with_the_std_of_the_recipe() -> None:
    shape = (400, 500)
    x = initial_values(Declaration(name="w", shape=shape), Box((0, 0), shape), INITIAL)
    assert x.mean().item() == pytest.approx(0, abs=2e-4)
    assert x.std().item() == pytest.approx(0.02, rel=0.01)
    inside = (x.abs() < 0.02).double().mean().item()
    assert inside == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.005)


def test_matrices_that_end_a_residual_branch_start_smaller_by_depth() -> None:
    box = Box((0, 0), (30, 30))
    normal, residual = (
        initial_values(Declaration(name="w", shape=(30, 30), init=init), box, INITIAL)
        for init in ("normal", "residual")
    )
    torch.testing.assert_close(residual, normal / math.sqrt(2 * 8))


def test_another_name_or_another_seed_draws_other_values() -> None:
    box = Box((0,), (100,))
    drawn = [
        initial_values(Declaration(name=name, shape=(100,)), box, INITIAL._replace(seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("a", 1))
    ]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert abs(torch.corrcoef(torch.stack(drawn))[0, 1:]).max() < 0.4


@given(st.text(max_size=5), SHAPES)
def test_uniform_numbers_lie_inside_the_unit_interval(key: str, shape: tuple[int, ...]) -> None:
    x = uniform_values(key, shape, Box((0,) * len(shape), shape))
    assert ((x > 0) & (x < 1)).all()


def test_draws_are_those_of_splitmix64() -> None:
    published = (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    )
    drawn = uniform_at(1234567, torch.arange(1, 6))
    assert drawn.tolist() == [((word >> 12) + 0.5) * 2.0**-52 for word in published]


def test_a_name_has_the_same_key_on_every_machine() -> None:
    assert key_of("0/blocks.0.attention.q.weight") == 2048705930696640711


@given(SHAPES.filter(lambda shape: len(shape) > 1), st.integers(1, 4), st.data())
def test_the_boxes_of_tensor_parallel_ranks_cover_a_split_parameter(
    shape: tuple[int, ...], parts: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    declaration = Declaration(name="w", shape=shape, tp_dim=dim)
    count = torch.zeros(shape)
    for index in range(parts):
        box = declaration.box(Share(parts, index))
        count[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] += 1
    assert (count == 1).all()


def test_matrices_decay_and_vectors_do_not() -> None:
    assert Declaration(name="w", shape=(2, 2)).decays
    assert not Declaration(name="b", shape=(4,)).decays


def test_declared_parameters_are_found_in_order_of_definition() -> None:
    class Pair(Declared):
        def __init__(self, prefix: str) -> None:
            super().__init__(prefix)
            self.declare("weight", (2, 2))
            self.declare("bias", (2,))

    both = nn.Sequential(Pair("a"), Pair("b"))
    names = [held.declaration.name for held in declared_in(both)]
    assert names == ["a.weight", "a.bias", "b.weight", "b.bias"]
