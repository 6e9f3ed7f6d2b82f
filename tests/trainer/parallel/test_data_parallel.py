"""Units and their reductions, without a model around them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.layout import Layout
from phalanx.oracle.pool import RankPool
from phalanx.trainer.engine.unit import Unit
from phalanx.trainer.model.parameters import WHOLE, Declared, Share, declared_in
from phalanx.trainer.parallel.data import Reducer, ShardedUnit
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.precision.dtypes import Dtypes

pytestmark = pytest.mark.ranks

FP64 = Dtypes.named("fp64", torch.device("cpu"))
NUM_UNITS, SIZE = 5, 7


class Vector(Declared):
    """One parameter that 2, 3 or 4 ranks cannot divide evenly."""

    def __init__(self, index: int) -> None:
        super().__init__(f"vector.{index}")
        self.declare("weight", (SIZE,))


def build(layout: Layout) -> tuple[list[Vector], list[ShardedUnit]]:
    """A few units of one parameter each; element j of unit i starts at 10 i + j."""
    mesh = build_mesh(layout, torch.device("cpu"))
    parts = mesh.shard if layout.zero_stage else mesh.data
    vectors, units = [], []
    for i in range(NUM_UNITS):
        vectors.append(Vector(i))
        held = list(declared_in(vectors[i]))
        unit = Unit(f"vector.{i}", held, WHOLE, Share(parts.size, parts.index), FP64)
        units.append(ShardedUnit(unit, mesh, mesh.copies, tied=False))
        start = torch.arange(SIZE, dtype=torch.float64) + 10 * i
        unit.fill(lambda _, __, start=start: start)
        units[i].release()
    return vectors, units


def gradient(rank: int, micro_batch: int, unit: int) -> Tensor:
    """What backward finds; different everywhere."""
    return torch.arange(SIZE, dtype=torch.float64) + 100 * rank + 10 * micro_batch + unit


def backward(
    vectors: list[Vector], units: list[ShardedUnit], micro_batch: int, order: list[int]
) -> None:
    """Let the gradients of the units arrive in this order."""
    for i in order:
        units[i].acquire()
        found = gradient(dist.get_rank(), micro_batch, i)
        (vectors[i].weight * found).sum().backward()


def reduced(
    layout: Layout, orders: list[list[int]], micro_batches: int, left_out: int | None = None
) -> list[Tensor]:
    """The gradients that this rank keeps after a step, at their place in the vector, else nan.

    Args:
        layout: of dp ranks only.
        orders: in which each rank's gradients arrive.
        micro_batches: backward passes of the step.
        left_out: a unit that no gradient reaches.
    """
    vectors, units = build(layout)
    reducer = Reducer(units)
    every = layout.zero_stage >= 2
    order = [i for i in orders[dist.get_rank()] if i != left_out]
    for micro_batch in range(micro_batches):
        if every or micro_batch == micro_batches - 1:
            reducer.enable()
        reducer.begin_backward()
        backward(vectors, units, micro_batch, order)
        reducer.end_backward()
    for unit in units:
        unit.finish()
    return [_in_place(unit.unit) for unit in units]


def _in_place(unit: Unit) -> Tensor:
    whole = torch.full((unit.padded,), torch.nan, dtype=torch.float64)
    whole[unit.low : unit.high] = unit.grad
    return whole[:SIZE]


def two_steps(layout: Layout) -> list[Tensor]:
    """As `reduced`, after a second step: nothing may be left of the first."""
    vectors, units = build(layout)
    reducer = Reducer(units)
    order = list(reversed(range(NUM_UNITS)))
    for micro_batch in (0, 1):
        reducer.enable()
        reducer.begin_backward()
        backward(vectors, units, micro_batch, order)
        reducer.end_backward()
        for unit in units:
            unit.finish()
    return [_in_place(unit.unit) for unit in units]


def moved(layout: Layout) -> list[Tensor]:
    """Every rank adds 1000 to the masters it keeps; what all then compute with."""
    vectors, units = build(layout)
    for unit in units:
        unit.unit.master += 1000
        unit.all_gather_weights()
    found = []
    for vector, unit in zip(vectors, units, strict=True):
        unit.acquire()
        found.append(vector.weight.detach().clone())
        unit.release()
    return found


def weights_in_memory(layout: Layout) -> list[int]:
    """Bytes of whole weights that each unit holds between uses."""
    _, units = build(layout)
    return [unit.unit.weights.untyped_storage().nbytes() for unit in units]


def check(found: list[list[Tensor]], expected: list[Tensor]) -> None:
    """Every rank's parts are right, and together they are the whole."""
    for unit, whole in enumerate(expected):
        covered = torch.zeros(SIZE, dtype=torch.bool)
        for rank in found:
            here = ~rank[unit].isnan()
            assert torch.equal(rank[unit][here], whole[here])
            covered |= here
        assert covered.all()


def total(ranks: int, micro_batches: int, unit: int) -> Tensor:
    pairs = [(r, m) for r in range(ranks) for m in range(micro_batches)]
    return torch.stack([gradient(r, m, unit) for r, m in pairs]).sum(0)


LAYOUTS = ["dp=2 zero=0", "dp=2 zero=1", "dp=3 zero=2", "dp=2 zero=3", "dp=4 shard=2 zero=2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_add_up_though_they_arrive_in_another_order_on_each_rank(
    ranks: RankPool, layout: str
) -> None:
    cut = Layout.parse(layout)
    orders = [
        [(i * step + rank) % NUM_UNITS for i in range(NUM_UNITS)]
        for rank, step in zip(range(cut.dp), (1, 2, 3, 4), strict=False)
    ]
    found = ranks.run(cut.dp, reduced, cut, orders, 3)
    check(found, [total(cut.dp, 3, unit) for unit in range(NUM_UNITS)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_unit_that_no_gradient_reaches_has_a_gradient_of_zero(
    ranks: RankPool, layout: str
) -> None:
    cut = Layout.parse(layout)
    orders = [list(range(NUM_UNITS))] * cut.dp
    found = ranks.run(cut.dp, reduced, cut, orders, 2, 1)
    expected = [total(cut.dp, 2, unit) for unit in range(NUM_UNITS)]
    expected[1] = torch.zeros(SIZE, dtype=torch.float64)
    check(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_begins_with_no_gradients_of_the_step_before(ranks: RankPool, layout: str) -> None:
    cut = Layout.parse(layout)
    found = ranks.run(cut.dp, two_steps, cut)
    second = [
        torch.stack([gradient(rank, 1, unit) for rank in range(cut.dp)]).sum(0)
        for unit in range(NUM_UNITS)
    ]
    check(found, second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_were_moved_in_parts_are_known_to_all(ranks: RankPool, layout: str) -> None:
    cut = Layout.parse(layout)
    for found in ranks.run(cut.dp, moved, cut):
        for unit, weights in enumerate(found):
            expected = torch.arange(SIZE, dtype=torch.float64) + 10 * unit + 1000
            assert torch.equal(weights, expected)


def test_only_stage_three_lets_go_of_whole_weights(ranks: RankPool) -> None:
    for layout in LAYOUTS:
        cut = Layout.parse(layout)
        for held in ranks.run(cut.dp, weights_in_memory, cut):
            assert all((size == 0) == (cut.zero == 3) for size in held)
