import pytest
from drawn_sizes import schedules
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ScheduleError, UsageError
from phalanx.core.schedule import Action, Kind
from phalanx.schedules.lower import add_reductions, add_transfers
from phalanx.schedules.text import from_csv, parse_action, to_csv

actions = st.builds(Action, st.integers(0, 2000), st.sampled_from(list(Kind)), st.integers(0, 2000))


@given(action=actions)
def test_an_action_reads_back_from_what_it_prints(action):
    assert parse_action(f" {action} ") == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2F0,", "2f0", "٢F0", "2F0 2F1"])
def test_what_is_no_action_is_quoted_and_shown_how_to_write(text):
    with pytest.raises(UsageError, match="as an action; write stage, kind and micro-batch"):
        parse_action(text)


@given(schedule=schedules(), lower=st.booleans())
def test_rows_read_back_from_a_file_with_their_sizes_and_placement(schedule, lower):
    if lower:
        schedule = add_reductions(add_transfers(schedule), every=True)
    assert from_csv(to_csv(schedule), schedule.name) == schedule


def test_idle_cells_and_blank_lines_at_the_end_are_skipped():
    text = "0F0,,,0B0\r\n,1F0, 1B0 ,\r\n,,,\r\n\r\n"
    assert from_csv(text, "hand").texts() == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize("text", ["", "\n\n", ",,\n,,"])
def test_a_file_without_actions_is_wrong_usage(text):
    with pytest.raises(UsageError, match=r"empty\.csv has no actions"):
        from_csv(text, "empty.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n0F1,0B1", "stage 0 stands on rank 0 and, as 0F1, on rank 1"),
        ("0F0,0B0\n2F0,2B0", "stage 1 stands nowhere"),
        ("0F0,2F0\n1F0", "3 stages over 2 ranks"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_csv(text, "bad")


def test_absurd_numbers_are_refused_without_counting_up_to_them():
    with pytest.raises(ScheduleError, match="stage 1 stands nowhere, but stage 99999999 does"):
        from_csv("0F0,99999999F0", "absurd")
    with pytest.raises(ScheduleError, match="micro-batch 1 stands nowhere, but micro-batch 99999"):
        from_csv("0F0,0F99999999", "absurd")
    with pytest.raises(UsageError, match="as an action"):
        from_csv(f"0F{'9' * 5000}", "absurd")
