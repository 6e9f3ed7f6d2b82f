import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.schedules.sizes import ANY, ONE, SEVERAL, Sizes


@given(least=st.integers(1, 9), multiple=st.integers(1, 5), n=st.integers(1, 60))
def test_the_fewest_that_are_taken_are_the_first_that_hold(least: int, multiple: int, n: int):
    sizes = Sizes(least * multiple, multiple)
    taken = [k for k in range(1, 100) if k % multiple == 0 and k >= least * multiple]
    assert [k for k in range(1, 100) if sizes.hold(k)] == taken
    assert sizes.fewest(n) == next(k for k in taken if k >= n)


@pytest.mark.parametrize(
    ("sizes", "n", "words", "nearest"),
    [
        (ONE, 3, "1", "1"),
        (SEVERAL, 1, "at least 2", "2"),
        (Sizes(4, 4), 6, "a multiple of 4", "4 or 8"),
        (Sizes(4, 4), 3, "a multiple of 4", "4"),
        (Sizes(8, 2), 11, "even and at least 8", "10 or 12"),
        (Sizes(2, 2), 3, "even", "2 or 4"),
        (Sizes(6, 1, 6), 9, "6", "6"),
    ],
)
def test_what_is_needed_and_what_is_nearest_are_said_in_words(
    sizes: Sizes, n: int, words: str, nearest: str
):
    assert (str(sizes), sizes.nearest(n)) == (words, nearest)


def test_any_number_will_do():
    assert all(ANY.hold(n) for n in range(1, 9))
    assert not ANY.fixed
