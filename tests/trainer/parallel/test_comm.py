import hashlib
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.core.layout import Layout
from phalanx.core.message import Message
from phalanx.oracle.pool import Job, RankPool
from phalanx.trainer.parallel.comm import DirectGroup, Group, UnevenSplits
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.mesh import build_mesh

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
SIZES = (1, 5, 12, 1000, 60_000)  # the largest does not fit into one hop


class Sent(NamedTuple):
    """What one rank puts in, and what every rank puts in."""

    mine: Tensor
    all: list[Tensor]


def group(kind: type[Group] = DirectGroup) -> Group:
    """All ranks."""
    return build_mesh(Layout(dp=dist.get_world_size()), torch.device("cpu"), kind).data


def drawn(size: int, dtype: torch.dtype) -> Sent:
    """A vector of every rank; each rank draws all of them."""
    generator = torch.Generator().manual_seed(size)
    ranks = range(dist.get_world_size())
    vectors = [(torch.randn(size, generator=generator) * 100).to(dtype) for _ in ranks]
    return Sent(vectors[dist.get_rank()].clone(), vectors)


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def sum_everywhere(kind: type[Group]) -> list[str]:
    """All-reduce every size and type; equal to a sum in one place."""
    together, digests = group(kind), []
    for dtype in DTYPES:
        for size in SIZES:
            sent = drawn(size, dtype)
            together.all_reduce(sent.mine, "test").wait()
            exact = torch.stack([x.double() for x in sent.all]).sum(0)
            near = {torch.bfloat16: 0.02, torch.float32: 1e-6}.get(dtype, 1e-15)
            scale = torch.stack([x.double().abs() for x in sent.all]).sum(0)
            assert ((sent.mine.double() - exact).abs() <= near * scale).all(), (dtype, size)
            digests.append(digest(sent.mine))
    return digests


def largest_everywhere(kind: type[Group]) -> list[str]:
    together, digests = group(kind), []
    for dtype in DTYPES:
        for size in SIZES:
            sent = drawn(size, dtype)
            together.all_reduce(sent.mine, "test", largest=True).wait()
            assert torch.equal(sent.mine, torch.stack(sent.all).amax(0)), (dtype, size)
            digests.append(digest(sent.mine))
    return digests


def gather_everywhere(kind: type[Group]) -> list[str]:
    together, digests = group(kind), []
    for dtype in DTYPES:
        for size in SIZES:
            sent = drawn(size, dtype)
            whole = torch.empty(size * len(sent.all), dtype=dtype)
            together.all_gather(whole, sent.mine, "test").wait()
            assert torch.equal(whole, torch.cat(sent.all)), (dtype, size)
            digests.append(digest(whole))
    return digests


def gather_in_place() -> None:
    """The part that a rank gives may already lie where it belongs."""
    sent = drawn(1000, torch.float64)
    whole = torch.zeros(1000 * len(sent.all), dtype=torch.float64)
    mine = whole.chunk(len(sent.all))[dist.get_rank()]
    mine.copy_(sent.mine)
    group().all_gather(whole, mine, "test").wait()
    assert torch.equal(whole, torch.cat(sent.all))


def scatter_sums(kind: type[Group]) -> None:
    """Reduce-scatter every size and type: the same bits as torch where sums are exact."""
    together, ranks = group(kind), dist.get_world_size()
    for dtype in DTYPES:
        for size in SIZES:
            sent = drawn(size * ranks, dtype)
            whole = [x.round() if dtype.is_floating_point else x for x in sent.all]
            part = torch.empty(size, dtype=dtype)
            together.reduce_scatter(part, whole[dist.get_rank()].clone(), "test").wait()
            total = torch.stack([x.double() for x in whole]).sum(0).to(dtype)
            mine = total.chunk(ranks)[dist.get_rank()]
            if dtype is torch.bfloat16:
                torch.testing.assert_close(part, mine, rtol=0.05, atol=4)
            else:
                assert torch.equal(part, mine), (dtype, size)


def many_at_once() -> list[float]:
    """Start all, then wait for all, in the same order."""
    together = group()
    vectors = [drawn(size, torch.float64).mine for size in SIZES * 3]
    pending = [together.all_reduce(x, f"number {i}") for i, x in enumerate(vectors)]
    for message in pending:
        message.wait()
        message.wait()  # once more does nothing
    return [x.sum().item() for x in vectors]


def pass_around() -> list[float]:
    """Everyone sends to the next, two messages each, matched in order."""
    together = group()
    rank, ranks = together.index, together.size
    sent = [torch.full((3,), 10.0 * rank + i) for i in range(2)]
    arrived = [torch.empty(3) for _ in sent]
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    pending = [together.send(x, after, "test", tag=i) for i, x in enumerate(sent)]
    pending += [together.receive(x, before, tag=i) for i, x in enumerate(arrived)]
    for message in pending:
        message.wait()
    return [x[0].item() for x in arrived]


def exchange_rows(kind: type[Group]) -> None:
    """Rank i gives rank j (i + 2 j) mod 3 rows, so that some get none; all rows say from whom."""
    together, ranks = group(kind), dist.get_world_size()
    me = together.index
    goes, comes = [(me + 2 * j) % 3 for j in range(ranks)], [(i + 2 * me) % 3 for i in range(ranks)]
    for dtype in DTYPES:
        x = torch.cat([torch.full((n, 2), 10 * me + j) for j, n in enumerate(goes)]).to(dtype)
        out = torch.empty(sum(comes), 2, dtype=dtype)
        together.all_to_all(out, x, "test", UnevenSplits(comes, goes, "go")).wait()
        assert out[:, 0].tolist() == [10 * i + me for i, n in enumerate(comes) for _ in range(n)]


def exchange_equal_rows(kind: type[Group]) -> list[float]:
    together, ranks = group(kind), dist.get_world_size()
    x = torch.arange(2.0 * ranks) + 100 * together.index
    out = torch.empty_like(x)
    together.all_to_all(out, x, "test").wait()
    assert together.ledger.messages() == [Message("data", "all_to_all", "test", x.nbytes, 1)]
    values: list[float] = out.tolist()
    return values


def shift_twice(kind: type[Group]) -> list[float]:
    """Two messages around the ring, the second before the first has been waited for."""
    together = group(kind)
    sent = [torch.full((3,), 10.0 * together.index + i) for i in range(2)]
    arrived = [torch.empty(3) for _ in sent]
    pending = [together.shift(out, x, "test") for out, x in zip(arrived, sent, strict=True)]
    for message in pending:
        message.wait()
    assert together.ledger.messages() == [Message("data", "send", "test", 12, 2)]
    return [x[0].item() for x in arrived]


def count_messages() -> list[Message]:
    together = group()
    x = torch.zeros(8)
    for _ in range(2):
        together.all_reduce(x, "sum").wait()
    together.all_gather(torch.zeros(8 * together.size), x, "gather").wait()
    return together.ledger.messages()


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("kind", [DirectGroup, Group])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("job", [sum_everywhere, largest_everywhere, gather_everywhere])
def test_every_rank_ends_with_the_same_right_bits(
    ranks: RankPool, job: Job, size: int, kind: type[Group]
) -> None:
    digests = ranks.run(size, job, kind)
    assert all(one == digests[0] for one in digests)


@pytest.mark.parametrize("kind", [DirectGroup, Group])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_keeps_its_part_of_the_sum(ranks: RankPool, size: int, kind: type[Group]) -> None:
    ranks.run(size, scatter_sums, kind)


def test_a_part_that_lies_in_its_place_is_gathered_from_there(ranks: RankPool) -> None:
    ranks.run(3, gather_in_place)


@pytest.mark.parametrize("size", [2, 4])
def test_messages_under_way_at_once_do_not_mix(ranks: RankPool, size: int) -> None:
    sums = ranks.run(size, many_at_once)
    assert all(one == sums[0] for one in sums)


def test_messages_between_two_ranks_arrive_in_order(ranks: RankPool) -> None:
    assert ranks.run(3, pass_around) == [[20.0, 21.0], [0.0, 1.0], [10.0, 11.0]]


@pytest.mark.parametrize("kind", [DirectGroup, Group])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_go_to_the_ranks_that_they_are_for(
    ranks: RankPool, size: int, kind: type[Group]
) -> None:
    ranks.run(size, exchange_rows, kind)


@pytest.mark.parametrize("kind", [DirectGroup, Group])
def test_without_sizes_all_ranks_get_equally_many_rows(ranks: RankPool, kind: type[Group]) -> None:
    found = ranks.run(3, exchange_equal_rows, kind)
    assert found[1] == [2.0, 3.0, 102.0, 103.0, 202.0, 203.0]


@pytest.mark.parametrize("kind", [DirectGroup, Group])
def test_a_ring_passes_on_what_each_rank_holds(ranks: RankPool, kind: type[Group]) -> None:
    assert ranks.run(3, shift_twice, kind) == [[20.0, 21.0], [0.0, 1.0], [10.0, 11.0]]


def test_the_ledger_counts_equal_messages(ranks: RankPool) -> None:
    for transfers in ranks.run(2, count_messages):
        assert transfers == [
            Message("data", "all_gather", "gather", 64, 1),
            Message("data", "all_reduce", "sum", 32, 2),
        ]


def test_a_group_of_one_says_nothing() -> None:
    ledger = Ledger()
    alone = DirectGroup("data", (0,), None, ledger)
    x, out = torch.arange(4.0), torch.empty(4)
    alone.all_reduce(x, "sum").wait()
    alone.reduce_scatter(out, x, "scatter").wait()
    assert torch.equal(out, torch.arange(4.0))
    assert ledger.messages() == []
