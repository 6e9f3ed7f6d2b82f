"""A layout is one line: it prints, parses, numbers ranks, cuts layers and batches, or refuses."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Coordinates, Layout, share
from phalanx.core.recompute import MODES

degrees = st.integers(1, 6)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp = draw(degrees)
    return Layout(
        dp=dp,
        pp=draw(degrees),
        tp=draw(degrees),
        cp=draw(st.integers(1, 3)),
        zero=draw(st.integers(0, 3)),
        shard=draw(st.sampled_from([d for d in range(1, dp + 1) if dp % d == 0])),
        v=draw(st.integers(1, 3)),
        schedule=draw(st.sampled_from(("1f1b", "zb-v", "rows.csv", "mine:SPEC"))),
        mb=draw(degrees),
        recompute=draw(st.sampled_from((*MODES, "full:4", "core", "norms+mlp"))),
        offload=draw(st.sampled_from(("none", "nvme", "activations+optimizer"))),
        reshard=draw(st.booleans()),
        logits=draw(st.sampled_from((0, 1, 1024))),
        precision=draw(st.sampled_from(("auto", "fp32", "bf16", "fp64"))),
        sp=draw(st.sampled_from([None, True, False])),
        stages=draw(st.sampled_from([(), (1, 2), (3,)])),
    )


@given(layouts())
def test_a_printed_layout_parses_to_itself(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts())
def test_the_settings_of_a_layout_build_it_again(layout: Layout) -> None:
    assert Layout.from_mapping(layout.settings()) == layout


@given(layouts())
def test_every_rank_has_coordinates_of_its_own(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    assert len(set(places)) == layout.ranks
    assert [layout.rank_at(at) for at in places] == list(range(layout.ranks))


def test_tp_varies_fastest_and_dp_slowest() -> None:
    layout = Layout(dp=2, pp=3, cp=5, tp=7)
    assert layout.coordinates(1) == Coordinates(dp=0, pp=0, cp=0, tp=1)
    assert layout.coordinates(7) == Coordinates(dp=0, pp=0, cp=1, tp=0)
    assert layout.coordinates(35) == Coordinates(dp=0, pp=1, cp=0, tp=0)
    assert layout.coordinates(105) == Coordinates(dp=1, pp=0, cp=0, tp=0)


def test_words_come_in_any_order_with_spaces_or_commas() -> None:
    line = "zero=3,tp=2  dp=4 , recompute=full"
    assert Layout.parse(line) == Layout(dp=4, tp=2, zero=3, recompute="full")


def test_what_is_not_named_has_its_default() -> None:
    assert Layout.parse("") == Layout()
    assert str(Layout()) == "dp=1 pp=1 tp=1"


def test_sequence_parallelism_is_on_where_there_is_tensor_parallelism() -> None:
    assert Layout(tp=2).sequence_parallel is True
    assert Layout(tp=2, sp=False).sequence_parallel is False
    assert Layout(tp=1, sp=True).sequence_parallel is False


def test_a_layout_keeps_what_was_asked_when_a_degree_is_changed() -> None:
    assert replace(Layout(tp=1), tp=2).sequence_parallel is True
    assert replace(Layout(dp=4), dp=8).shards == 8
    assert replace(Layout(dp=8), dp=4).shards == 4
    assert replace(Layout(dp=4, shard=2), dp=8).replicas == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("dq=2", "did you mean"),
        ("dp", "write key=value"),
        ("dp=2 dp=4", "stands twice"),
        ("dp=two", "whole number"),
        ("dp=0", "at least 1"),
        ("zero=4", "0, 1, 2, 3"),
        ("sp=maybe", "on or off"),
        ("stages=3+x", "whole number"),
    ],
)
def test_a_line_that_makes_no_sense_is_wrong_usage(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Layout.parse(line)


def test_a_shard_that_does_not_divide_dp_is_refused_with_those_that_do() -> None:
    with pytest.raises(RefusedError, match="shard can be 1, 2, 3, 6"):
        Layout(dp=6, shard=4)


def test_zero_without_ranks_that_share_a_copy_is_stage_0() -> None:
    assert Layout(dp=1, zero=3).zero_stage == 0
    assert Layout(dp=4, shard=1, zero=3).zero_stage == 0
    assert Layout(dp=4, shard=2, zero=3).zero_stage == 3


def test_a_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    layout = Layout(dp=4, mb=3)
    assert layout.micro_batches(24) == 2
    with pytest.raises(RefusedError, match=r"the batch can be 12 or 24"):
        layout.micro_batches(20)
    with pytest.raises(RefusedError, match=r"the batch can be 12$"):
        layout.micro_batches(5)


@given(st.integers(0, 300), st.integers(1, 17))
def test_shares_lie_end_to_end_and_differ_by_at_most_one(total: int, parts: int) -> None:
    shares = [share(total, parts, i) for i in range(parts)]
    ends = [offset + size for offset, size in shares]
    assert [offset for offset, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == total
    sizes = [size for _, size in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tp": 2.5}, "tp is 2.5; it is a whole number"),
        ({"dp": "2"}, "whole number"),
        ({"zero": True}, "whole number"),
        ({"schedule": 3}, "name of one"),
    ],
)
def test_a_value_of_the_wrong_kind_is_wrong_usage_in_python_too(
    values: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Layout(**values)
