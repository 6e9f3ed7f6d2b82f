"""Messages of which each part can be used, or sent, before the others are there."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.core.layout import Layout
from phalanx.core.message import Message
from phalanx.oracle.pool import RankPool
from phalanx.trainer.parallel.comm import DirectGroup, Group
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.parallel.tensor import TensorParallel
from phalanx.trainer.precision.product import Multiplier, Operand, Plain

pytestmark = pytest.mark.ranks


def group(kind: type[Group]) -> Group:
    """All ranks."""
    return build_mesh(Layout(dp=dist.get_world_size()), torch.device("cpu"), kind).data


def gather(kind: type[Group]) -> list[int]:
    """Gather twice, the second before the first is used; in which order parts come."""
    together = group(kind)
    mine = [torch.full((2, 3), 10.0 * together.index + i) for i in range(2)]
    wholes = [torch.empty(2 * together.size, 3) for _ in mine]
    both = [
        together.all_gather_parts(whole, x, "test") for whole, x in zip(wholes, mine, strict=True)
    ]
    for i, parts in enumerate(both):
        for part in parts:
            part.pending.wait()
            assert (part.data == 10 * part.source + i).all()
        assert wholes[i][::2, 0].tolist() == [10 * rank + i for rank in range(together.size)]
    assert together.ledger.messages() == [Message("data", "all_gather", "test", 24 * len(parts), 2)]
    return [part.source for part in both[0]]


def use_own_part_first() -> None:
    """The last rank gives its part only when told that all others have used their own."""
    together, told = group(DirectGroup), torch.ones(1)
    last = together.size - 1
    if together.index == last:
        for source in range(last):
            together.receive(torch.empty(1), source).wait()
    whole = torch.empty(together.size)
    own, *others = together.all_gather_parts(whole, torch.full((1,), 7.0), "test")
    own.pending.wait()
    assert own.data.item() == 7
    if together.index < last:
        together.send(told, last, "told").wait()
    for part in others:
        part.pending.wait()
    assert (whole == 7).all()


def scatter(kind: type[Group]) -> list[int]:
    """The same bits as a whole reduce-scatter; in which order parts are made."""
    together, made = group(kind), []
    size = together.size
    whole = torch.randn(3 * size, 2, generator=torch.Generator().manual_seed(together.index))

    def make(part: int) -> torch.Tensor:
        made.append(part)
        return whole.chunk(size)[part].clone()

    out, expected = torch.empty(3, 2), torch.empty(3, 2)
    together.reduce_scatter_parts(out, make, "parts").wait()
    DirectGroup("data", together.ranks, together.handle, together.ledger).reduce_scatter(
        expected, whole, "whole"
    ).wait()
    assert torch.equal(out, expected)
    sent = [Message("data", "reduce_scatter", name, 24 * size, 1) for name in ("parts", "whole")]
    assert together.ledger.messages() == sent
    return made


class Telling(Plain):
    """Tells the last rank when it has been asked to multiply for the first time."""

    def __init__(self, group: Group) -> None:
        self.group, self.told = group, False

    def forward(self, x: Operand, w: Operand) -> Tensor:
        if not self.told:
            self.told = True
            self.group.send(torch.ones(1), self.group.size - 1, "told").wait()
        return super().forward(x, w)


class Layer(NamedTuple):
    """A projection without bias."""

    weight: nn.Parameter
    bias: None
    product: Multiplier


def multiply_own_part_first() -> None:
    """The last rank starts its product when told that all others multiply already."""
    group = build_mesh(Layout(tp=dist.get_world_size()), torch.device("cpu")).tensor
    last, t = group.size - 1, group.size
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(t * n, 4, generator=generator, dtype=torch.float64) for n in (2, 3))
    product: Multiplier = Telling(group)
    if group.index == last:
        product = Plain()
        for source in range(last):
            group.receive(torch.empty(1), source).wait()
    tp = TensorParallel(group, sequence=True)
    layer = Layer(nn.Parameter(w.chunk(t)[group.index].clone()), None, product)
    (y,) = tp.columns(tp.my_sequence(x).unsqueeze(1), layer)
    torch.testing.assert_close(y.squeeze(1), x @ w.chunk(t)[group.index].t())


@pytest.mark.parametrize("kind", [DirectGroup, Group])
@pytest.mark.parametrize("size", [2, 3])
def test_a_gather_hands_over_the_nearest_part_first(
    ranks: RankPool, size: int, kind: type[Group]
) -> None:
    orders = ranks.run(size, gather, kind)
    assert orders == [[(rank - i) % size for i in range(size)] for rank in range(size)]


def test_a_ranks_own_part_is_there_before_others_have_sent_theirs(ranks: RankPool) -> None:
    ranks.run(3, use_own_part_first)


@pytest.mark.parametrize("size", [2, 3])
def test_a_product_begins_with_the_part_that_is_here(ranks: RankPool, size: int) -> None:
    ranks.run(size, multiply_own_part_first)


@pytest.mark.parametrize("kind", [DirectGroup, Group])
@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_is_made_part_by_part_its_own_last(
    ranks: RankPool, size: int, kind: type[Group]
) -> None:
    orders = ranks.run(size, scatter, kind)
    assert orders == [[(rank + i) % size for i in (*range(1, size), 0)] for rank in range(size)]
