import json
from urllib.parse import quote

import pytest
from explorer_client import get

from phalanx.explore.problems import BY_ID, PROBLEMS, grade

NUMBERS = [problem for problem in PROBLEMS if problem.unit != "yes or no"]


@pytest.mark.parametrize("problem", NUMBERS, ids=lambda problem: problem.id)
def test_the_right_answer_is_right_and_a_wrong_one_is_not(problem):
    right = problem.answer()
    assert grade(problem, f"{right:.10g}").verdict == "good"
    assert grade(problem, f"{1.02 * right:.10g}").verdict == "good"
    for factor in (1.2, 0.8, 2, 0.5, 1000, 17):
        found = grade(problem, f"{factor * right:.10g}")
        assert found.verdict == "bad"
        assert found.reason


@pytest.mark.parametrize("problem", NUMBERS, ids=lambda problem: problem.id)
def test_every_frequent_slip_is_wrong_and_says_why(problem):
    for wrong, why in problem.slips:
        assert grade(problem, f"{wrong():.10g}") == ("bad", "not quite", why)


def test_a_decision_is_graded_too():
    assert grade(BY_ID["q3dp"], "no").verdict == "good"
    assert grade(BY_ID["q3dp"], "Yes").verdict == "bad"
    assert grade(BY_ID["q3dp"], "perhaps").verdict == "note"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("q2p", "26 GB"),
        ("q1", "13B"),
        ("q3floor", "3.48M"),
        ("bubble", "19 %"),
        ("bubble", "0.19"),
        ("q3step", "310ms"),
        ("q3step", "0.31 s"),
        ("rate", "964,510 tokens"),
    ],
)
def test_answers_are_read_as_people_write_them(name: str, text: str):
    assert grade(BY_ID[name], text).verdict == "good"


@pytest.mark.parametrize("text", ["", "many", "-3", "<script>", "1e999"])
def test_what_cannot_be_read_is_not_graded(text: str):
    assert grade(BY_ID["q1"], text).verdict in ("note", "bad")
    assert grade(BY_ID["q1"], text).reason


def test_the_server_grades(address: str):
    found = json.loads(get(address, f"/api/v1/grade?problem=q2p&answer={quote('52 GB')}").text)
    assert (found["verdict"], found["reason"]) == ("bad", "bf16 has two bytes, not four")
    assert get(address, "/api/v1/grade?problem=none&answer=1").status == 404
