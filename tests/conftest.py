"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from phalanx.oracle import pool
from phalanx.oracle.pool import RankPool
from phalanx.trainer.run import launch

# Small tensors gain nothing from threads, and threads that wait for one another on cores that other
# tests keep busy cost ten times what they compute. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# One process is forked from for pools and for launched runs, whichever comes first.
launch.PRELOAD = (*launch.PRELOAD, *pool.PRELOADED)

# where a change is judged, the same examples are drawn each time
settings.register_profile("phalanx", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("phalanx")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes, started once."""
    with RankPool(8) as pool:
        yield pool
