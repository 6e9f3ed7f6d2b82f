from dataclasses import dataclass
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.core.layout import Layout
from phalanx.trainer.engine.unit import Unit
from phalanx.trainer.engine.zero import ZeroPolicy
from phalanx.trainer.model.parameters import WHOLE, Box, Declaration, Declared, Share, declared_in
from phalanx.trainer.precision.dtypes import Dtypes

CPU = torch.device("cpu")
FP64, BF16 = Dtypes.named("fp64", CPU), Dtypes.named("bf16", CPU)


class Odd(Declared):
    """Matrices cut both ways, a vector held whole, and one whose gradient is partial."""

    def __init__(self, rows: int = 5, columns: int = 3) -> None:
        super().__init__("odd")
        self.declare("out", (rows, columns), tp_dim=0)
        self.declare("bias", (rows,), tp_dim=0)
        self.declare("norm", (columns,), needs_tp_reduce=True)
        self.declare("into", (columns, rows), tp_dim=1)
        self.declare("whole", (columns,))


def unit(
    tensor: Share = WHOLE,
    part: Share = WHOLE,
    precision: Dtypes = FP64,
    module: nn.Module | None = None,
    zero: int = 0,
) -> Unit:
    """A unit of an `Odd`, with memory."""
    held = list(declared_in(module or Odd()))
    made = Unit("odd", held, tensor, part, precision)
    made.allocate(CPU, ZeroPolicy.of(Layout(dp=2, zero=zero)))
    return made


def counted(declaration: Declaration, box: Box) -> Tensor:
    """Values that tell where in the whole tensor an element belongs."""
    whole = torch.arange(prod(declaration.shape), dtype=torch.float64).view(declaration.shape)
    return whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


ranks = st.tuples(st.integers(1, 3), st.integers(1, 5))


@given(ranks, st.integers(3, 7), st.integers(3, 5), st.integers(0, 3))
def test_every_element_of_the_model_is_answered_for_by_exactly_one_rank(
    degrees: tuple[int, int], rows: int, columns: int, zero: int
) -> None:
    tp, dp = degrees
    count: dict[str, Tensor] = {}
    for t in range(tp):
        for d in range(dp):
            made = unit(Share(tp, t), Share(dp, d), module=Odd(rows, columns), zero=zero)
            for slot, start, stop in made.own_pieces():
                mark = torch.zeros(prod(slot.box.sizes))
                mark[start - slot.start : stop - slot.start] = 1
                whole = count.setdefault(slot.declaration.name, torch.zeros(slot.declaration.shape))
                place = tuple(slice(o, o + n) for o, n in zip(*slot.box, strict=True))
                whole[place] += mark.view(slot.box.sizes)
    assert sorted(count) == ["odd.bias", "odd.into", "odd.norm", "odd.out", "odd.whole"]
    assert all((whole == 1).all() for whole in count.values())


@given(st.integers(1, 6))
def test_the_parts_of_ranks_are_equally_long_and_cover_the_vector(parts: int) -> None:
    spans = [unit(part=Share(parts, i), zero=1).my_part for i in range(parts)]
    assert spans[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert spans[-1][1] == unit(part=Share(parts, 0)).padded
    assert len({stop - start for start, stop in spans}) == 1


def test_what_tensor_parallel_ranks_must_add_up_comes_first() -> None:
    made = unit()
    assert made.slots[0].declaration.name == "odd.norm"
    assert made.tp_reduce_stop == 3


@given(st.integers(1, 6), st.data())
def test_the_optimizer_sees_each_element_of_its_part_but_no_padding(
    parts: int, data: st.DataObject
) -> None:
    part = data.draw(st.integers(0, parts - 1))
    made = unit(part=Share(parts, part), zero=1)
    runs = list(made.optimizer_ranges())
    seen = sum(run.stop - run.start for run in runs)
    assert seen == max(0, min(made.slots[-1].stop, made.high) - made.low)
    for run in runs:
        owners = {
            slot.declaration.decays
            for slot, _, _ in made.pieces(made.low + run.start, made.low + run.stop)
        }
        assert owners == {run.decays}


def test_a_unit_without_sharding_has_one_range_that_decays_and_one_that_does_not() -> None:
    assert [run.decays for run in unit().optimizer_ranges()] == [False, True]


@pytest.mark.parametrize("precision", [FP64, BF16])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_the_master_copy_starts_as_this_ranks_part_of_the_weights(
    precision: Dtypes, part: int
) -> None:
    made = unit(Share(2, 1), Share(3, part), precision, zero=3)
    made.fill(counted)
    torch.testing.assert_close(
        made.weights[made.low : made.high].to(made.master.dtype), made.master
    )
    assert made.master.dtype == precision.master
    assert made.weights.dtype == precision.compute


def test_modules_compute_with_views_of_the_vector() -> None:
    module = Odd()
    made = unit(module=module)
    made.fill(counted)
    assert torch.equal(module.out, counted(module.declarations["out"], Box((0, 0), (5, 3))))
    made.weights.zero_()
    assert not module.out.any()


def test_masters_of_the_same_type_are_the_weights_themselves() -> None:
    made = unit(part=Share(2, 1), zero=1)
    made.master.fill_(7.0)
    assert (made.weights[made.low : made.high] == 7.0).all()
    assert not made.weights[: made.low].any()


@dataclass
class Keeper:
    unit: Unit
    arrived: dict[str, Tensor]

    def keep(self, index: int, grad: Tensor) -> None:
        self.arrived[self.unit.slots[index].declaration.name] = grad


def test_a_parameter_keeps_no_gradient_of_its_own() -> None:
    module = Odd()
    made = unit(module=module)
    arrived: dict[str, Tensor] = {}
    keeper = Keeper(made, arrived)
    made.on_gradient(keeper.keep)
    (module.out * 3).sum().backward()
    assert list(arrived) == ["odd.out"]
    assert torch.equal(arrived["odd.out"], torch.full((5, 3), 3.0, dtype=torch.float64))
    assert module.out.grad is None


def test_a_copy_that_does_not_count_answers_for_nothing() -> None:
    made = unit()
    made.counted = False
    assert list(made.own_pieces()) == []
    assert list(made.own_ranges()) == []


@pytest.mark.parametrize(
    ("name", "compute", "master"),
    [
        ("fp64", torch.float64, torch.float64),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("auto", torch.float32, torch.float32),
    ],
)
def test_precisions_by_name_on_a_cpu(name: str, compute: torch.dtype, master: torch.dtype) -> None:
    precision = Dtypes.named(name, CPU)
    assert (precision.compute, precision.master) == (compute, master)
