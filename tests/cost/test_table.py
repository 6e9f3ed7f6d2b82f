"""A table of layouts says of each row what the layout says of itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.layout import CONTEXTS, Layout
from phalanx.core.model import ModelShape
from phalanx.core.recompute import MODES
from phalanx.core.run import Recipe
from phalanx.cost.table import Choice, Table
from phalanx.schedules.layouts import chunks
from phalanx.schedules.registry import NAMES

layouts = st.builds(
    Layout,
    dp=st.sampled_from([2, 4, 8]),
    tp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2, 3]),
    zero=st.integers(0, 3),
    shard=st.sampled_from([0, 1, 2]),
    sp=st.sampled_from([None, False]),
    recompute=st.sampled_from(MODES),
    schedule=st.sampled_from(NAMES),
    context=st.sampled_from(CONTEXTS),
)


@given(st.lists(layouts, min_size=1, max_size=6), st.integers(1, 100))
def test_what_follows_from_a_row_is_what_follows_from_its_layout(
    rows: list[Layout], seq: int
) -> None:
    table = Table.of(ModelShape(), Recipe(seq=seq, batch=48), rows)
    for i, layout in enumerate(rows):
        assert table.zero_stage[i] == layout.zero_stage
        assert table.sharers[i] == layout.sharers
        assert table.padded_seq[i] == layout.padded_seq(seq)
        assert table.v[i] == chunks(layout)
        assert table.m[i] == 48 // (layout.dp * layout.mb)
    assert table.recompute.pick(lambda r: r.segment).tolist() == [r.recompute.segment for r in rows]


@given(st.lists(layouts, min_size=2, max_size=6))
def test_rows_can_be_taken_and_changed(rows: list[Layout]) -> None:
    table = Table.of(ModelShape(), Recipe(), rows)
    some = table.take(np.array([1, 0, 1]), zero=np.array([1, 2, 3]))
    assert some.dp.tolist() == [rows[1].dp, rows[0].dp, rows[1].dp]
    assert some.zero.tolist() == [1, 2, 3]
    assert some.schedule.values[some.schedule.codes[0]] == rows[1].schedule


def test_a_choice_is_asked_once_for_each_value() -> None:
    asked: list[str] = []
    column = Choice.of(["a", "b", "a", "a"])
    assert column.pick(lambda value: asked.append(value) or len(asked)).tolist() == [1, 2, 1, 1]
