"""Helpers of tables: rows multiplied by values, and rows that differ."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from phalanx.cost.table import Floats, Integers


class Ragged:
    """A list of values for each key; it multiplies rows by the values that their key has."""

    def __init__(self, lists: Mapping[int, Sequence[int]]) -> None:
        self._keys = np.array(sorted(lists), dtype=np.int64)
        ordered = [lists[key] for key in self._keys.tolist()]
        self._counts = np.array([len(values) for values in ordered], dtype=np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self._values = np.array([v for values in ordered for v in values], dtype=np.int64)

    def counts(self, keys: Integers) -> Integers:
        """How many values each key has; a key without a list is not noticed."""
        result: Integers = self._counts[np.searchsorted(self._keys, keys)]
        return result

    def cross(self, keys: Integers) -> tuple[Integers, Integers]:
        """One row for each value of each key: the row it comes from, and the value.

        Args:
            keys: of every row, of shape (rows,); each must have a list.

        Example:
            >>> lists = Ragged({1: [7], 2: [8, 9]})
            >>> [column.tolist() for column in lists.cross(np.array([2, 1]))]
            [[0, 0, 1], [8, 9, 7]]
        """
        counts = self.counts(keys).astype(np.intp)  # 32 bits wide in a browser
        parents = np.repeat(np.arange(len(keys)), counts)
        places = np.arange(len(parents)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = self._starts[np.searchsorted(self._keys, keys[parents])]
        return parents, self._values[starts + places]


class Different(NamedTuple):
    """The combinations of values that occur in some columns.

    Attributes:
        first: a row that stands for each of them, of shape (combinations,).
        inverse: the combination of every row, of shape (rows,).
    """

    first: Integers
    inverse: Integers


def different(columns: Sequence[Integers], least: Integers | Floats | None = None) -> Different:
    """The rows that differ in some columns.

    Args:
        columns: whole numbers from 0, each of shape (rows,).
        least: of equal rows the one where this is least stands for all of them; None takes the
            last.

    Example:
        >>> found = different([np.array([3, 5, 3]), np.array([1, 1, 1])])
        >>> found.first.tolist(), found.inverse.tolist()
        ([2, 1], [0, 1, 0])
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        places, count = _places(column)
        code = code * count + places
    places, count = _places(code)
    order = np.arange(len(code)) if least is None else np.argsort(-least, kind="stable")
    first = np.empty(count, dtype=np.int64)
    first[places[order]] = order  # the last one written stays
    return Different(first, places)


def _places(column: Integers) -> tuple[Integers, int]:
    """The place of every value among those that occur, and how many do."""
    most = int(column.max(initial=0)) + 1
    if most > 8 * len(column) + 1024:
        values, places = np.unique(column, return_inverse=True)
        return places.reshape(-1), len(values)
    seen = np.zeros(most, dtype=np.int64)
    seen[column] = 1
    numbers: Integers = np.cumsum(seen) - 1
    return numbers[column], int(numbers[-1]) + 1
