"""What all tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from phalanx.oracle.pool import RankPool

settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes, started once."""
    with RankPool(8) as pool:
        yield pool
