import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.schedule import Kind
from phalanx.schedules.build import build, forward_only, lowered, lowered_forward_only
from phalanx.schedules.check_lowered import check_lowered
from phalanx.schedules.placement import looped
from phalanx.schedules.registry import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_built_under_its_own_name(name):
    schedule = build(name, 2, 4)
    assert (schedule.name, schedule.p, schedule.m) == (name, 2, 4)


def test_an_unknown_name_suggests_the_nearest_one():
    with pytest.raises(UsageError, match="did you mean 1f1b"):
        build("1f1", 2, 4)


@pytest.mark.parametrize(("p", "m", "v"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-2, 1, 1)])
def test_sizes_below_one_are_wrong_usage(p, m, v):
    with pytest.raises(UsageError, match="at least 1"):
        build("1f1b", p, m, v)
    with pytest.raises(UsageError, match="at least 1"):
        forward_only(p, m, v)


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("zb-h2", 1), ("zb-v", 2)])
def test_only_interleaved_lets_the_number_of_stages_be_chosen(name, v):
    assert build(name, 2, 4) == build(name, 2, 4, v)
    with pytest.raises(RefusedError, match=f"needs v to be {v}, not v=3; v can be {v}"):
        build(name, 2, 4, 3)


@given(p=st.integers(1, 5), m=st.integers(1, 9), v=st.integers(1, 3), every=st.booleans())
def test_what_the_trainer_and_the_evaluation_obey_is_lowered_and_checked(p, m, v, every):
    check_lowered(lowered(Layout(pp=p), m, every))
    evaluation = lowered_forward_only(looped(p, v), m)
    check_lowered(evaluation, trains=False)
    crossings = (p * v - 1) * m if p > 1 else 0
    kinds = [action.kind for row in evaluation.rows for action in row]
    assert kinds.count(Kind.SEND_FORWARD) == kinds.count(Kind.RECV_FORWARD) == crossings
    assert len(kinds) == p * v * m + 2 * crossings
