"""Made-up batches are a pure function of their coordinates, and hard in the ways they promise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.data.batches import IGNORED
from phalanx.data.synthetic import SEPARATOR, SyntheticStream

MASKS = st.sampled_from(["none", "uneven", "holes"])
DEALS = [(ranks, in_turn) for ranks in (2, 4, 8) for in_turn in (False, True)]


def valid_tokens(stream, step=0):
    """Targets that count, by position."""
    return (stream.batch(step, range(stream.batch_size)).targets != IGNORED).sum(axis=1)


def deal(values, ranks, in_turn):
    """Sum the values of each rank's positions."""
    by_rank = values.reshape(-1, ranks).T if in_turn else values.reshape(ranks, -1)
    return by_rank.sum(axis=1)


@given(
    stream=st.builds(
        SyntheticStream,
        vocab=st.integers(2, 300),
        seq=st.integers(1, 40),
        batch=st.integers(1, 16),
        seed=st.integers(0, 2**40),
        masked=MASKS,
        documents=st.booleans(),
    ),
    step=st.integers(0, 1000),
    data=st.data(),
)
def test_a_row_depends_on_step_and_position_only(stream, step, data):
    whole = stream.batch(step, range(stream.batch_size))
    positions = data.draw(st.lists(st.integers(0, stream.batch_size - 1), min_size=1))
    part = stream.batch(step, positions)
    assert (part.tokens == whole.tokens[positions]).all()
    assert (part.targets == whole.targets[positions]).all()
    assert (part.positions == whole.positions[positions]).all()
    assert ((whole.tokens >= 0) & (whole.tokens < stream.vocab)).all()
    assert (part.documents is None) is not stream.documents


@given(seq=st.integers(1, 40), batch=st.integers(1, 16), step=st.integers(0, 99), masked=MASKS)
def test_some_target_of_the_global_batch_always_counts(seq, batch, step, masked):
    assert valid_tokens(SyntheticStream(96, seq, batch, 0, masked), step).sum() > 0


def test_without_a_mask_every_target_counts():
    assert (valid_tokens(SyntheticStream(96, 32, 8, 0)) == 32).all()


def test_uneven_masks_are_those_of_the_oracle_and_one_sequence_has_none():
    assert valid_tokens(SyntheticStream(96, 8, 8, 0, "uneven")).tolist() == [6, 2, 7, 0, 1, 3, 1, 2]


@pytest.mark.parametrize(("ranks", "in_turn"), DEALS)
def test_uneven_masks_give_every_pair_of_neighbours_different_counts(ranks, in_turn):
    counts = deal(valid_tokens(SyntheticStream(96, 32, 8, 0, "uneven")), ranks, in_turn)
    assert (np.diff(counts) != 0).all()


@pytest.mark.parametrize(("ranks", "in_turn"), DEALS)
@pytest.mark.parametrize("batch", [8, 16, 24])
def test_holes_leave_some_rank_without_any_target(batch, ranks, in_turn):
    counts = deal(valid_tokens(SyntheticStream(96, 32, batch, 0, "holes")), ranks, in_turn)
    assert counts.min() == 0 < counts.max()


def test_holes_are_scattered():
    valid = SyntheticStream(96, 64, 8, 0, "holes").batch(0, [0]).targets[0] != IGNORED
    assert 16 < valid.sum() < 48
    assert (np.diff(valid.astype(int)) != 0).sum() > 16


@given(seed=st.integers(0, 10**9), step=st.integers(0, 100))
def test_documents_are_packed_and_their_ends_teach_nothing(seed, step):
    batch = SyntheticStream(96, 32, 8, seed, documents=True).batch(step, range(8))
    ends = batch.tokens == SEPARATOR
    assert ends.any(axis=1).all()
    assert (batch.targets[ends] == IGNORED).all()
    assert (batch.documents.max(axis=1) >= 1).all()


def test_seeds_steps_and_positions_have_tokens_of_their_own():
    rows = [
        SyntheticStream(96, 32, 8, seed).batch(step, [position]).tokens[0].tobytes()
        for seed in range(3)
        for step in range(3)
        for position in range(8)
    ]
    assert len(set(rows)) == len(rows)


def test_the_tokens_of_all_past_runs_are_kept():
    batch = SyntheticStream(96, 8, 8, 1234, documents=True).batch(2, [5])
    assert batch.tokens.tolist() == [[60, 63, 27, 0, 0, 39, 69, 31]]
    plain = SyntheticStream(96, 8, 8, 1234).batch(2, [5])
    assert plain.tokens.tolist() == [[25, 63, 87, 46, 59, 2, 52, 16]]


def test_an_unknown_mask_names_those_that_exist():
    with pytest.raises(UsageError, match="did you mean holes"):
        SyntheticStream(96, 8, 8, 0, "hole")


def test_documents_need_room_beside_the_separator():
    with pytest.raises(UsageError, match="vocab=1"):
        SyntheticStream(1, 8, 8, 0, documents=True)
