"""The stateless shuffle is a permutation, looks random, and never changes silently."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.shuffle import fold, mix, permute

SEEDS = st.integers(-(2**70), 2**70)


@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_every_index_is_sent_to_a_place_of_its_own(size, seed, epoch):
    places = permute(np.arange(size), size, fold(seed, epoch))
    assert sorted(places) == list(range(size))


@given(size=st.integers(1, 2**40), indices=st.lists(st.integers(0, 2**40), min_size=1), seed=SEEDS)
def test_a_place_depends_on_its_own_index_and_key_only(size, indices, seed):
    index = np.array(indices) % size
    key = fold(seed, np.arange(len(index)) % 3)
    together = permute(index, size, key)
    alone = [permute(index[i : i + 1], size, key[i : i + 1])[0] for i in range(len(index))]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < size)).all()


def test_the_first_place_is_uniform_over_seeds():
    size, draws = 10, 20_000
    places = permute(np.zeros(draws, dtype=np.int64), size, fold(7, np.arange(draws)))
    expected = draws / size
    chi_square = ((np.bincount(places, minlength=size) - expected) ** 2 / expected).sum()
    assert chi_square < 33.7  # one in ten thousand, with 9 degrees of freedom


@pytest.mark.parametrize("size", [97, 1000, 47_340])
def test_neighbours_do_not_stay_neighbours(size):
    places = permute(np.arange(size), size, fold(0, 0))
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 4 / size**0.5
    assert (np.diff(places) == 1).sum() < 8  # one is expected


def test_epochs_and_seeds_have_orders_of_their_own():
    keys = [fold(0, 0), fold(0, 1), fold(1, 0), fold(1, 1), fold(-1, 0), fold(2**64 + 2, 0)]
    orders = {tuple(permute(np.arange(100), 100, key)) for key in keys}
    assert len(orders) == len(keys)


def test_mixing_is_that_of_splitmix64():
    """The first outputs of SplitMix64 seeded with 1234567, from the Rosetta Code task."""
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_the_order_of_all_past_runs_is_kept():
    large = [318163359623, 453033050136, 919554650226]
    assert permute(np.arange(12), 12, fold(0, 0)).tolist() == [7, 4, 0, 1, 3, 5, 8, 2, 6, 9, 11, 10]
    assert permute(np.arange(4), 47_340, fold(1234, 3)).tolist() == [7227, 39677, 28393, 23583]
    assert permute(np.arange(3), 10**12, fold(-5, 0)).tolist() == large
