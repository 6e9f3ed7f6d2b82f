"""Ranks of one start find each other in a store full of what the dead have left there."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from phalanx.core.errors import StartError
from phalanx.trainer.run.agent_store import Meeting, meet

TIMEOUT = timedelta(seconds=20)


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def start(port: int, ranks: int) -> list[Meeting]:
    """All ranks of one start, in threads."""
    with ThreadPoolExecutor(ranks) as pool:
        joined = [
            pool.submit(lambda r=rank: meet(connect(port), r, ranks, TIMEOUT))
            for rank in reversed(range(ranks))
        ]
        return [future.result() for future in reversed(joined)]


def test_every_start_has_a_number_and_names_of_its_own(server: TCPStore) -> None:
    for attempt in range(3):
        meetings = start(server.port, 4)
        assert [meeting.attempt for meeting in meetings] == [attempt] * 4
        assert not meetings[3].store.check(["address"])
        meetings[0].store.set("address", f"of start {attempt}")
        assert meetings[3].store.get("address") == f"of start {attempt}".encode()
        meetings[0].job.set("directory", "runs/a")
    assert meetings[2].job.get("directory") == b"runs/a"


def test_a_call_of_the_dead_does_not_keep_the_living_waiting(server: TCPStore) -> None:
    start(server.port, 2)
    connect(server.port).set("phalanx/call/1", "a rank that died before it had an answer")
    assert [meeting.attempt for meeting in start(server.port, 2)] == [1, 1]


def test_a_rank_that_never_comes_is_named(server: TCPStore) -> None:
    with pytest.raises(StartError, match=r"waited in vain for ranks \[1, 2\]"):
        meet(connect(server.port), 0, 3, timedelta(seconds=0.05))
