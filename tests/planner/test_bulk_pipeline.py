"""The ranks of pipelines by column."""

from phalanx.catalog import load
from phalanx.planner.bulk_pipeline import ranks_of
from phalanx.planner.candidates import Variant


def test_the_ranks_of_a_variant_are_told_apart_by_their_blocks():
    shape = load.model("llama-3.1-405b")  # 126 blocks: 14 of 16 ranks hold 8, the ends 7
    ranks = ranks_of(shape, [Variant("1f1b", 16, 1)])
    assert ranks.dense.tolist() == [[7, 7, 8]]
    assert ranks.place.tolist() == [[0, 15, 1]]  # of all with 8, the one that holds most in flight
    assert ranks.last.tolist() == [[0, 1, 0]]


def test_dualpipe_holds_two_stages_and_each_end_of_the_model_on_one_rank():
    ranks = ranks_of(load.model("llama-3-8b"), [Variant("dualpipe", 4, 1)])
    assert ranks.copies.tolist() == [2]
    assert ranks.dense[0, 0] == 16
    assert ranks.last[0, 0] == 1
