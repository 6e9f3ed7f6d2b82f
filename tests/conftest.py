"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from phalanx.oracle.pool import RankPool

# where a change is judged, the same examples are drawn each time
settings.register_profile("phalanx", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("phalanx")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes, started once."""
    with RankPool(8) as pool:
        yield pool
