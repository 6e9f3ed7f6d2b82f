import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.schedule import Kind
from phalanx.schedules.check import check
from phalanx.schedules.play import play
from phalanx.schedules.spec import ScheduleSpec
from phalanx.schedules.zero_bubble import ZB_H1, ZB_H2, ZB_V


@pytest.mark.parametrize("spec", [ZB_H1, ZB_H2, ZB_V], ids=lambda spec: spec.name)
@given(p=st.integers(1, 7), m=st.integers(1, 20))
def test_any_sizes_are_complete_and_free_of_deadlock(spec: ScheduleSpec, p: int, m: int):
    check(spec.build(p, m))


def test_zb_h1_draws_the_figure_of_the_paper():
    rows = [
        " ".join(f"{a.kind.value}{a.microbatch}" for a in row) for row in ZB_H1.build(3, 4).rows
    ]
    assert rows == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zb_h2_warms_up_until_the_first_gradient_is_back():
    rows = [
        " ".join(f"{a.kind.value}{a.microbatch}" for a in row) for row in ZB_H2.build(3, 5).rows
    ]
    assert rows == [
        "F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4",
        "F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4",
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4",
    ]


@given(p=st.integers(1, 7), extra=st.integers(0, 8))
def test_zb_v_keeps_every_rank_busy_from_its_first_action_to_its_last(p, extra):
    schedule = ZB_V.build(p, 2 * p - 1 + extra)
    unit = {Kind.FORWARD: 1, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 1}
    for starts in play(schedule, unit):
        assert starts == list(range(int(starts[0]), int(starts[0]) + len(starts)))


def test_zb_v_puts_the_first_and_the_last_stage_on_one_rank():
    assert ZB_V.build(3, 5).ranks == (0, 1, 2, 2, 1, 0)
