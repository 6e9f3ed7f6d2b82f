import os
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from phalanx.core.errors import RefusedError
from phalanx.oracle.pool import RankFailedError, RankPool


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


def test_more_ranks_than_there_are_cannot_be_had() -> None:
    with RankPool(2) as pool, pytest.raises(ValueError, match="3 ranks wanted of a pool of 2"):
        pool.run(3, place)
