import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.planner.columns import Ragged, different


@given(st.dictionaries(st.integers(0, 50), st.lists(st.integers(0, 9), max_size=4), min_size=1))
def test_rows_are_multiplied_by_the_values_of_their_key(lists: dict[int, list[int]]):
    keys = np.array(sorted(lists) * 2, dtype=np.int64)
    ragged = Ragged(lists)
    parents, values = ragged.cross(keys)
    assert ragged.counts(keys).tolist() == [len(lists[key]) for key in keys.tolist()]
    expected = [(row, value) for row, key in enumerate(keys.tolist()) for value in lists[key]]
    assert list(zip(parents.tolist(), values.tolist(), strict=True)) == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**9), st.floats(0, 1)), min_size=1))
def test_equal_rows_are_one_and_the_least_of_them_stands_for_it(rows):
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1)]
    weight = np.array([row[2] for row in rows])
    first, inverse = different(columns, least=weight)
    groups = {row[:2] for row in rows}
    assert len(first) == len(groups)
    for place, row in enumerate(rows):
        stands = first[inverse[place]]
        assert rows[stands][:2] == row[:2]
        assert weight[stands] <= row[2]
