"""Batches depend on (seed, step, position) alone, and cover the corpus."""

import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import DataError, UsageError
from phalanx.data.batches import IGNORED, HeldOutStream, SampleStream, cut
from phalanx.data.corpus import Corpus


def corpus_of(tokens, separator=0, vocab=256):
    return Corpus(
        name="a made-up text",
        tokens=np.asarray(tokens),
        separator=separator,
        bytes_per_token=math.nan,
        vocab=vocab,
    )


def counting(length):
    """A corpus whose token ids are their own positions."""
    return corpus_of(np.arange(length), separator=None, vocab=length)


STREAMS = st.builds(
    lambda length, seq, batch, seed: SampleStream(
        counting(length), seq=min(seq, length - 1), batch=batch, seed=seed
    ),
    length=st.integers(2, 400),
    seq=st.integers(1, 40),
    batch=st.integers(1, 24),
    seed=st.integers(-(2**40), 2**40),
)


@given(stream=STREAMS, step=st.integers(0, 10**6), data=st.data())
def test_a_batch_is_the_same_however_its_positions_are_dealt(stream, step, data):
    whole = stream.batch(step, range(stream.batch_size))
    ranks = data.draw(st.integers(1, stream.batch_size))
    in_turn = data.draw(st.booleans())
    dealt = [
        list(range(r, stream.batch_size, ranks))
        if in_turn
        else list(map(int, np.array_split(np.arange(stream.batch_size), ranks)[r]))
        for r in range(ranks)
    ]
    for positions in dealt:
        part = stream.batch(step, positions)
        assert (part.tokens == whole.tokens[positions]).all()
        assert (part.targets == whole.targets[positions]).all()


@given(stream=STREAMS, epoch=st.integers(0, 5))
def test_every_window_comes_once_per_epoch(stream, epoch):
    n, b = stream.num_windows, stream.batch_size
    samples = [divmod(g, b) for g in range(epoch * n, (epoch + 1) * n)]
    seen = [int(stream.windows(step, [position])[0]) for step, position in samples]
    assert sorted(seen) == list(range(n))


@given(stream=STREAMS, other=st.integers(1, 24), start=st.integers(0, 500))
def test_the_sample_stream_goes_on_after_a_resume_with_another_batch_size(stream, other, start):
    """Sample g is the same whichever (step, position) it falls on."""
    resumed = SampleStream(stream.corpus, seq=stream.seq, batch=other, seed=stream.seed)
    for g in range(start, start + 12):
        was = stream.windows(g // stream.batch_size, [g % stream.batch_size])
        assert was == resumed.windows(g // other, [g % other])


@given(stream=STREAMS)
def test_an_epoch_predicts_every_token_of_its_windows_once(stream):
    n, b = stream.num_windows, stream.batch_size
    targets = [stream.batch(g // b, [g % b]).targets.ravel() for g in range(n)]
    assert sorted(np.concatenate(targets)) == list(range(1, n * stream.seq + 1))


@given(stream=STREAMS, step=st.integers(0, 1000))
def test_a_target_is_the_token_that_follows(stream, step):
    batch = stream.batch(step, range(stream.batch_size))
    assert (batch.targets == batch.tokens + 1).all()
    assert (batch.positions == np.arange(stream.seq)).all()
    assert batch.documents is None
    assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == np.int64


PACKED = st.lists(
    st.lists(st.integers(1, 9), max_size=6).map(lambda ids: [*ids, 0]), min_size=1, max_size=6
)


@given(documents=PACKED)
def test_a_packed_window_equals_its_documents_alone(documents):
    packed = np.array([[*chain(*documents), 7]])
    batch = cut(packed, separator=0)
    for index, document in enumerate(documents):
        mine = batch.documents[0] == index
        alone = cut(np.array([[*document, 7]]), separator=0)
        assert batch.tokens[0, mine].tolist() == document == alone.tokens[0].tolist()
        assert batch.targets[0, mine].tolist() == [*document[1:], IGNORED]
        assert batch.targets[0, mine].tolist() == alone.targets[0].tolist()
        assert batch.positions[0, mine].tolist() == list(range(len(document)))
    assert batch.documents.dtype == np.int32
    assert batch.documents.max() == len(documents) - 1


def test_without_a_document_mask_a_separator_is_a_token_like_any_other():
    batch = cut(np.array([[5, 0, 6, 7]]), separator=None)
    assert batch.targets.tolist() == [[0, 6, 7]]
    assert batch.positions.tolist() == [[0, 1, 2]]


def test_the_stream_masks_documents_when_told_to():
    stream = SampleStream(corpus_of([1, 2, 0, 3, 4]), seq=4, batch=1, seed=0, document_mask=True)
    batch = stream.batch(0, [0])
    assert batch.tokens.tolist() == [[1, 2, 0, 3]]
    assert batch.targets.tolist() == [[2, 0, IGNORED, 4]]
    assert batch.positions.tolist() == [[0, 1, 2, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1]]


def test_a_corpus_smaller_than_a_batch_is_read_again_and_again():
    stream = SampleStream(counting(9), seq=4, batch=5, seed=0)
    assert stream.num_windows == 2
    assert sorted(stream.windows(0, range(4))) == [0, 0, 1, 1]
    assert stream.epoch(2) == 5.0
    assert stream.tokens_seen(2) == 40


def test_the_order_of_all_past_runs_is_kept():
    stream = SampleStream(counting(1001), seq=10, batch=8, seed=1234)
    into_the_second_epoch = [56, 33, 85, 20, 7, 21, 0, 38]
    assert stream.windows(0, range(8)).tolist() == [29, 14, 32, 35, 67, 43, 65, 31]
    assert stream.windows(12, range(8)).tolist() == into_the_second_epoch
    assert stream.windows(999_999, [0, 7]).tolist() == [78, 3]
    assert stream.batch(3, [5]).tokens[0, 0] == 450


def test_a_text_shorter_than_a_sequence_names_the_longest_that_works():
    with pytest.raises(DataError, match=r"has 8 tokens .* recipe.seq=8 needs 9; .* at most 7$"):
        SampleStream(counting(8), seq=8, batch=1, seed=0)
    assert SampleStream(counting(8), seq=7, batch=1, seed=0).num_windows == 1


def test_documents_cannot_be_masked_when_nothing_says_where_they_end():
    with pytest.raises(UsageError, match=r"set data.separator, or data.document_mask = false$"):
        SampleStream(counting(9), seq=4, batch=1, seed=0, document_mask=True)


@pytest.mark.parametrize(("bad", "says"), [(40, "is 40, beyond model.vocab=32"), (-3, "is -3")])
def test_a_batch_with_an_unknown_token_is_refused(bad, says):
    ids = np.ones(50, dtype=np.int32)
    ids[23] = bad
    stream = SampleStream(corpus_of(ids, vocab=32), seq=7, batch=7, seed=0)
    with pytest.raises(DataError, match=f"token 23 of a made-up text {says}"):
        stream.batch(0, range(7))


def test_one_token_is_too_short_for_any_sequence():
    with pytest.raises(DataError, match="has 1 token to learn from, and learning needs at least 2"):
        SampleStream(corpus_of([7]), seq=1, batch=1, seed=0)


@given(length=st.integers(2, 60), seq=st.integers(1, 100))
def test_a_sequence_as_long_as_proposed_fits(length, seq):
    try:
        SampleStream(counting(length), seq=seq, batch=1, seed=0)
    except DataError as error:
        proposed = int(str(error).rpartition(" ")[2])
        assert SampleStream(counting(length), seq=proposed, batch=1, seed=0).num_windows == 1


@given(stream=STREAMS, batches=st.integers(1, 100))
def test_held_out_windows_are_distinct_whatever_the_batch(stream, batches):
    held_out = HeldOutStream(stream, batches)
    counted = []
    for step in range(held_out.num_batches):
        targets = held_out.batch(step, range(stream.batch_size)).targets
        counted += [row[0] for row in targets if (row != IGNORED).any()]
    assert len(counted) == min(batches * stream.batch_size, stream.num_windows)
    assert len(set(counted)) == len(counted)
