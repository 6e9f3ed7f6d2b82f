"""Every number that the three founding documents work out, against our functions.

The values stand in worked_numbers.json with the document and section they come from.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from worked import ANSWERS

NUMBERS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("worked_numbers.json").read_text()
)


@pytest.mark.parametrize("number", NUMBERS, ids=[n["name"] for n in NUMBERS])
def test_our_function_gives_the_worked_number(number: dict[str, Any]):
    tolerance = 1e-3 if number["name"] in ROUNDED else 1e-9
    assert ANSWERS[number["name"]]() == pytest.approx(number["value"], rel=tolerance)


def test_every_worked_number_has_a_function_and_every_function_a_number():
    assert set(ANSWERS) == {n["name"] for n in NUMBERS}


ROUNDED = {
    "fsdp.llama3_70b_days",  # chips rounded down to 18,823
    "mixed.ratio_check",  # the floor rounded to 99.2
    "h800.link_measured.C_implied",  # the page prints 4,517 of something
}
