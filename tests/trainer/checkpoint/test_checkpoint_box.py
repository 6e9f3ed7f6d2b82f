"""Index arithmetic of parts and moves."""

import torch
from checkpoint_ranks import Cut, cuts
from hypothesis import given
from hypothesis import strategies as st

from phalanx.trainer.checkpoint.box import FlatRange, Region, moves

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def elements(part: FlatRange, shape: tuple[int, ...]) -> torch.Tensor:
    """The global numbers of the elements that a part holds, in its order."""
    everything = torch.arange(torch.Size(shape).numel()).reshape(shape)
    region = zip(part.box.offsets, part.box.sizes, strict=True)
    box = everything[tuple(slice(a, a + n) for a, n in region)]
    return box.reshape(-1)[part.start : part.stop].contiguous()


def part(cut: Cut) -> FlatRange:
    return FlatRange(Region(cut.offsets, cut.sizes), cut.start, cut.stop)


@given(st.data())
def test_blocks_of_a_part_are_few_and_hold_its_elements_in_order(data):
    shape = data.draw(shapes)
    for cut in data.draw(cuts(shape)):
        held = part(cut)
        blocks = list(held.blocks())
        assert len(blocks) <= max(2 * len(shape) - 1, 1)
        in_order = [elements(FlatRange(b, 0, b.elements), shape) for b in blocks]
        joined = torch.cat(in_order) if in_order else torch.empty(0, dtype=torch.int64)
        assert torch.equal(joined, elements(held, shape))


@given(st.data())
def test_moves_from_all_parts_of_one_cut_fill_any_part_of_another_exactly_once(data):
    shape = data.draw(shapes)
    written = [part(cut) for cut in data.draw(cuts(shape))]
    for wanted in (part(cut) for cut in data.draw(cuts(shape))):
        out = torch.full((wanted.stop - wanted.start,), -1)
        for source in written:
            have = elements(source, shape)
            for move in moves(source, wanted):
                assert move.source_stop <= len(have)
                read = have[move.source : move.source_stop]
                target = out[move.target :].as_strided(move.sizes, move.target_strides)
                assert (target == -1).all()
                target.copy_(read.as_strided(move.sizes, move.source_strides))
        assert torch.equal(out, elements(wanted, shape))


def test_parts_of_the_same_box_share_one_contiguous_run():
    box = Region((2, 3), (4, 5))
    (move,) = moves(FlatRange(box, 3, 17), FlatRange(box, 8, 20))
    assert (move.sizes, move.source, move.target) == ((9,), 5, 0)


def test_parts_of_boxes_that_lie_apart_share_nothing():
    left, right = Region((0, 0), (4, 3)), Region((0, 3), (4, 2))
    assert list(moves(FlatRange(left, 0, 12), FlatRange(right, 0, 8))) == []
