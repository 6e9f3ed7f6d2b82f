import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.core.errors import LostMessageError, PhalanxError, RankLeftError, RefusedError
from phalanx.core.layout import Layout
from phalanx.oracle.pool import RankFailedError, RankPool
from phalanx.trainer.parallel.comm import DirectGroup
from phalanx.trainer.parallel.ledger import Ledger
from phalanx.trainer.parallel.mesh import build_mesh, group_timeout


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of this module's own, since its tests break them."""
    with RankPool(2) as pool:
        yield pool


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def twice(number: int) -> int:
    return 2 * number


def refuse() -> None:
    if place()[0] == 1:
        raise RefusedError("no")
    time.sleep(60)


def stumble() -> None:
    raise ZeroDivisionError("one over zero")


def die() -> None:
    if place()[0] == 1:
        os._exit(3)
    time.sleep(60)


@pytest.mark.ranks
@pytest.mark.parametrize("count", [1, 2])
def test_each_rank_knows_its_place(pair: RankPool, count: int) -> None:
    assert pair.run(count, place) == [(rank, count) for rank in range(count)]


@pytest.mark.ranks
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="of Linux")
def test_no_rank_interrupts_the_one_that_sends_to_it(pair: RankPool) -> None:
    assert pair.run(2, os.sched_getscheduler, 0) == [os.SCHED_BATCH] * 2


@pytest.mark.ranks
def test_a_job_gets_its_arguments_on_every_rank(pair: RankPool) -> None:
    assert pair.run(2, twice, 21) == [42, 42]


@pytest.mark.ranks
def test_a_message_for_the_user_comes_home_as_it_is(pair: RankPool) -> None:
    with pytest.raises(RefusedError, match=r"^no$"):
        pair.run(2, refuse)


@pytest.mark.ranks
def test_any_other_error_comes_home_with_its_traceback(pair: RankPool) -> None:
    with pytest.raises(RankFailedError, match=r"rank .*(?s:.*)in stumble(?s:.*)one over zero"):
        pair.run(2, stumble)


@pytest.mark.ranks
def test_a_rank_that_dies_is_noticed_at_once(pair: RankPool) -> None:
    with pytest.raises(RankFailedError, match="rank 1 died"):
        pair.run(2, die)


@pytest.mark.ranks
def test_a_pool_works_on_after_a_failure(pair: RankPool) -> None:
    with pytest.raises(RankFailedError):
        pair.run(2, stumble)
    assert pair.run(2, place) == [(0, 2), (1, 2)]


def meet(value: float) -> torch.Tensor:
    """The sum over both ranks."""
    total = torch.full((1,), value)
    build_mesh(Layout(dp=2), torch.device("cpu")).data.all_reduce(total, "sums").wait()
    return total


def find_out_whether_the_first_is_there() -> str:
    """Rank 0 is done at once; rank 1, later, waits in vain for a message from it."""
    handle = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    group = DirectGroup("data", (0, 1), handle, Ledger())
    if group.index == 0:
        return ""
    time.sleep(1)
    try:
        group.receive(torch.empty(1), 0).wait()
    except PhalanxError as error:
        return type(error).__name__
    return "arrived"


def cut_off_once(flag: Path) -> float:
    """The first time, rank 1 leaves while rank 0 waits for it."""
    if place()[0] == 1 and not flag.exists():
        flag.touch()
        group = build_mesh(Layout(dp=2), torch.device("cpu")).data
        dist.destroy_process_group(group.handle)
        raise RankLeftError("the other one left rank 1")
    return float(meet(2.0))


def cut_off_always() -> None:
    raise RankLeftError("the other one left")


def die_beside_one_that_waits() -> None:
    if place()[0] == 1:
        time.sleep(0.3)
        os._exit(3)
    meet(1.0)


def timeouts(layout: Layout) -> set[float]:
    """How long this rank waits for a message of each of its groups, in seconds."""
    mesh = build_mesh(layout, torch.device("cpu"), kv_heads=1)
    groups = [mesh.world, mesh.tensor, mesh.pipeline, mesh.context, mesh.data, mesh.shard]
    groups += [
        mesh.replica,
        mesh.expert,
        mesh.expert_copies.all,
        mesh.embedding_group,
        mesh.pipeline_replicas,
        mesh.kv_replicas,
    ]
    handles = [group.handle for group in groups if group.handle is not None]
    assert len(handles) > 2
    found = [group_timeout(handle) for handle in handles]
    return {timeout.total_seconds() for timeout in found if timeout is not None}


def sleep_through_a_message() -> None:
    """Rank 1 does not come to what rank 0 waits for."""
    handle = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    group = DirectGroup("data", (0, 1), handle, Ledger())
    if group.index == 1:
        time.sleep(60)
    group.all_reduce(torch.ones(1), "gradients").wait()


@pytest.mark.ranks
def test_no_rank_leaves_while_another_still_works(pair: RankPool) -> None:
    assert pair.run(2, find_out_whether_the_first_is_there) == ["", "LostMessageError"]


@pytest.mark.ranks
def test_a_lost_connection_is_tried_again_with_fresh_ranks_and_told(tmp_path: Path) -> None:
    told: list[str] = []
    with RankPool(2, told.append) as pool:
        assert pool.run(2, cut_off_once, tmp_path / "flag") == [4.0, 4.0]
        (line,) = told
        assert line.startswith("2 ranks lost their connections, once more: ")
        with pytest.raises(RankLeftError):
            pool.run(2, cut_off_always)
        assert len(told) == 3


@pytest.mark.ranks
def test_of_a_rank_that_dies_and_one_that_waits_for_it_the_dead_one_is_told(
    pair: RankPool,
) -> None:
    with pytest.raises(RankFailedError, match="rank 1 died"):
        pair.run(2, die_beside_one_that_waits)


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["dp=4 shard=2 tp=2 ep=2", "pp=2 tp=2 dp=2", "cp=2 pp=2 tp=2"])
def test_every_group_waits_as_long_as_the_world(ranks: RankPool, line: str) -> None:
    layout = Layout.parse(line)
    assert ranks.run(layout.ranks, timeouts, layout) == [{120.0}] * layout.ranks


@pytest.mark.ranks
def test_who_did_not_come_to_which_message_is_told(pair: RankPool) -> None:
    told = r"^rank 0 waited 1 s for rank 1: 'gradients' along data \(ranks 0, 1\) never came$"
    with pytest.raises(LostMessageError, match=told):
        pair.run(2, sleep_through_a_message)


def test_more_ranks_than_there_are_cannot_be_had() -> None:
    with RankPool(2) as pool, pytest.raises(ValueError, match="3 ranks wanted of a pool of 2"):
        pool.run(3, place)
