"""The ranks of pipelines that differ."""

import numpy as np

from phalanx.catalog import load
from phalanx.core.layout import Layout
from phalanx.planner.kinds import RankKinds


def test_the_ranks_of_a_pipeline_are_told_apart_by_their_blocks():
    shape = load.model("llama-3.1-405b")  # 126 blocks: 14 of 16 ranks hold 8, the ends 7
    kinds = RankKinds.of(shape, [Layout(pp=16)])
    assert kinds.blocks.dense.tolist() == [[7, 7, 8]]
    assert kinds.place.tolist() == [[0, 15, 1]]  # of all with 8, the one that holds most in flight
    assert kinds.blocks.last.tolist() == [[0, 1, 0]]


def test_dualpipe_holds_two_stages_and_each_end_of_the_model_on_one_rank():
    kinds = RankKinds.of(load.model("llama-3-8b"), [Layout(pp=4, schedule="dualpipe")])
    assert kinds.copies.tolist() == [2]
    assert kinds.blocks.dense[0, 0] == 16
    assert kinds.blocks.last[0, 0] == 1


def test_pipelines_with_fewer_kinds_repeat_their_first_rank():
    shape = load.model("llama-3.1-405b")
    kinds = RankKinds.of(shape, [Layout(), Layout(pp=16)])
    assert kinds.number.tolist() == [2, 3]
    assert kinds.blocks.dense[0].tolist() == [126] * 3
    assert kinds.kinds(np.array([0])) == 2


def test_equal_schedules_stand_together_and_no_rows_have_none():
    layouts = [Layout(pp=2), Layout(pp=2, schedule="gpipe")]
    kinds = RankKinds.of(load.model("llama-3-8b"), layouts)
    assert list(kinds.runs(np.array([0, 0, 1]))) == [("1f1b", slice(0, 2)), ("gpipe", slice(2, 3))]
    assert list(kinds.runs(np.array([], dtype=np.int64))) == []
