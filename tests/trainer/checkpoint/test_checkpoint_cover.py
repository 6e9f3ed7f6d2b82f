"""A save in which ranks disagree about who owns what is never committed."""

import pytest
import torch
from checkpoint_ranks import Cut, make_savers, outcomes, piece

WHOLE = torch.arange(24.0).reshape(4, 6)


def save(directory, *ranks, wholes=None):
    """Save one list of cuts of `w` per rank; returns what each rank is told."""
    savers = make_savers(directory, len(ranks), patience=20.0)
    for saver, cuts in zip(savers, ranks, strict=True):
        whole = wholes[saver.rank] if wholes else WHOLE
        saver.save(1, [piece("w", "weight", whole, cut) for cut in cuts], {})
    return outcomes(savers)


def refused(directory, *ranks, wholes=None):
    """The one message that all ranks are told."""
    told = save(directory, *ranks, wholes=wholes)
    assert len(set(told)) == 1
    assert not list(directory.iterdir())
    return told[0]


def test_a_whole_that_is_cut_in_two_dims_and_flat_ranges_is_committed(tmp_path):
    boxes = [((a, b), (2, 3)) for a in (0, 2) for b in (0, 3)]
    first = [Cut(*box, 0, 4) for box in boxes]
    second = [Cut(*box, 4, 6) for box in boxes]
    assert save(tmp_path, first, second) == ["", ""]


def test_elements_that_nobody_saves_are_named(tmp_path):
    told = refused(tmp_path, [Cut((0, 0), (4, 6), 0, 10)], [Cut((0, 0), (4, 6), 11, 24)])
    assert "weight of w: nobody saves elements 10 to 11 of the box of (4, 6) at (0, 0)" in told
    told = refused(tmp_path, [Cut((0, 0), (4, 6), 0, 10)], [Cut((0, 0), (4, 6), 10, 23)])
    assert "nobody saves elements 23 to 24" in told


def test_elements_that_two_ranks_save_are_named_with_both_files(tmp_path):
    told = refused(tmp_path, [Cut((0, 0), (4, 6), 0, 10)], [Cut((0, 0), (4, 6), 9, 24)])
    assert "elements 9 to 10 of the box of (4, 6) at (0, 0) are saved twice" in told
    assert "in rank-00000.safetensors and in rank-00001.safetensors" in told


def test_copies_of_the_same_part_on_two_ranks_are_refused(tmp_path):
    everything = [Cut((0, 0), (4, 6), 0, 24)]
    assert "elements 0 to 24" in refused(tmp_path, everything, everything)


def test_boxes_that_overlap_are_refused(tmp_path):
    told = refused(tmp_path, [Cut((0, 0), (3, 6), 0, 18)], [Cut((2, 0), (2, 6), 0, 12)])
    assert "the boxes of (3, 6) at (0, 0) and of (2, 6) at (2, 0) overlap" in told


def test_a_missing_box_is_refused(tmp_path):
    told = refused(tmp_path, [Cut((0, 0), (1, 6), 0, 6)], [Cut((2, 0), (2, 6), 0, 12)])
    assert "weight of w has shape (4, 6), 24 elements; ranks save 18 of them" in told


@pytest.mark.parametrize("other", [torch.zeros(2, 12), torch.zeros(4, 6, dtype=torch.float64)])
def test_ranks_that_disagree_about_shape_or_dtype_are_refused(tmp_path, other):
    mine = Cut((0, 0), (4, 6), 0, 12)
    theirs = Cut((0, 0), tuple(other.shape), 12, 24)
    told = refused(tmp_path, [mine], [theirs], wholes=[WHOLE, other])
    assert "weight of w is F32 (4, 6) in rank-00000.safetensors and " in told


@pytest.mark.parametrize("value", [float("nan"), (1, 2), {3: 4}, object(), {1}])
def test_a_state_that_json_would_change_is_refused_with_its_key(tmp_path, value):
    savers = make_savers(tmp_path, 2)
    whole = Cut((0, 0), (4, 6), 0, 24)
    savers[0].save(1, [piece("w", "weight", WHOLE, whole)], {"step": 1, "odd": value})
    savers[1].save(1, [], {})
    told = outcomes(savers)
    assert told[0] == told[1]
    assert "has 'odd' = " in told[0]
    assert not list(tmp_path.iterdir())
