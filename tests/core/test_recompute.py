"""What is computed again is read once, and printed as it is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.core.recompute import FULL, NONE, PARTS, SELECTIVE, Recompute

parts = st.frozensets(st.sampled_from(PARTS)).map(lambda some: Recompute(parts=some))
segments = st.integers(1, 9).map(lambda k: Recompute(segment=k))


@given(parts | segments)
def test_what_is_printed_is_read_to_the_same(recompute: Recompute) -> None:
    assert Recompute.parse(str(recompute)) == recompute


def test_the_modes_of_the_papers_have_their_words() -> None:
    assert [str(mode) for mode in (NONE, SELECTIVE, FULL)] == ["none", "selective", "full"]
    assert Recompute.parse("core") == SELECTIVE
    assert Recompute.parse("full:1") == FULL


@pytest.mark.parametrize("text", ["half", "full:0", "full:two", "norms+", "none+mlp"])
def test_an_unknown_word_is_refused_with_those_that_exist(text: str) -> None:
    with pytest.raises(UsageError, match="none, selective, full"):
        Recompute.parse(text)
