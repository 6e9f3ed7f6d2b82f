"""A shuffle without a list: where a sample goes is computed, never stored.

Any rank can ask for any place of any epoch, so nothing about the order has to be sent, saved or
replayed. The price is a few integer operations per sample.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15


def mix(x: Words) -> Words:
    """Scramble 64-bit words, one to one, so that neighbours look unrelated.

    Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 17
    (the variant of SplitMix64).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fold(*numbers: int | NDArray[np.int64]) -> Words:
    """Make one 64-bit key of several numbers; their order matters.

    Args:
        numbers: each an integer of any size (taken modulo 2^64), or an array of them.

    Returns:
        uint64, at least one-dimensional, in the common shape of the numbers.
    """
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = mix(key + _words(number) + np.uint64(_GOLDEN))
    return key


def permute(index: NDArray[np.int64], size: int, key: Words) -> NDArray[np.int64]:
    """Send each index to its place in a pseudo-random permutation of 0 .. size - 1.

    A balanced Feistel network permutes the smallest power of four that holds `size`; a place beyond
    `size` is permuted again until it falls inside (cycle walking), which keeps the map one to one.

    Args:
        index: int64, values in [0, size).
        size: how many there are; at least 1.
        key: uint64, which permutation; broadcasts against `index`.

    Returns:
        int64, the shape of `index`.

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 3 and 4.

    Example:
        >>> epoch = permute(np.arange(10), 10, key=fold(1234, 0))
        >>> sorted(epoch.tolist()) == list(range(10))
        True
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    place = _feistel(index.astype(np.uint64), half, key)
    while (outside := place >= np.uint64(size)).any():
        place = np.where(outside, _feistel(place, half, key), place)
    return place.astype(np.int64)


def _feistel(x: Words, half: int, key: Words) -> Words:
    """Permute 2 * `half` bits: each round exchanges the halves and hides one behind the other."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (mix(right + mix(key + np.uint64(number))) & mask)
    return (left << bits) | right


def _words(number: int | NDArray[np.int64]) -> Words:
    if isinstance(number, int):
        return np.array([number % (1 << 64)], dtype=np.uint64)
    return number.astype(np.uint64)
