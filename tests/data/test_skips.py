"""Which batch a step learns from, once windows of the stream are skipped."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.batches import SampleStream
from phalanx.data.corpus import Corpus
from phalanx.data.skips import Skips

JUMPS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=5)


def jumped(jumps: list[tuple[int, int]]) -> Skips:
    """As a run does it: back to a step, and past the batches that were met until then."""
    skips = Skips()
    for step, ahead in jumps:
        skips = skips.jump(step, skips.batch_of(step + ahead) + 1)
    return skips


@given(JUMPS)
def test_no_batch_comes_twice_and_none_out_of_order(jumps):
    batches = [jumped(jumps).batch_of(step) for step in range(80)]
    assert batches == sorted(set(batches))


@given(JUMPS, st.integers(0, 50))
def test_a_jump_changes_nothing_before_its_step_and_arrives_where_it_should(jumps, step):
    before = jumped(jumps)
    after = before.jump(step, 500)
    assert all(after.batch_of(i) == before.batch_of(i) for i in range(step))
    assert [after.batch_of(step + i) for i in range(3)] == [500, 501, 502]


@given(JUMPS)
def test_what_a_checkpoint_keeps_reads_back(jumps):
    assert Skips.from_json(jumped(jumps).to_json()) == jumped(jumps)


@pytest.mark.parametrize("rows", [3, [3], [[1]], [[1, -2]], [[1, 2.0]], [[1, True]], [[1, 2, 3]]])
def test_what_is_no_list_of_windows_is_refused(rows):
    with pytest.raises((TypeError, ValueError)):
        Skips.from_json(rows)


def test_a_stream_gives_the_samples_of_the_batches_that_are_left():
    corpus = Corpus(
        name="ids", tokens=np.arange(500), separator=None, bytes_per_token=math.nan, vocab=500
    )
    stream, plain = (SampleStream(corpus, seq=4, batch=3, seed=1) for _ in range(2))
    stream.skips = Skips().jump(2, 7)
    for step, batch in enumerate((0, 1, 7, 8)):
        assert (stream.windows(step, [0, 1, 2]) == plain.windows(batch, [0, 1, 2])).all()
