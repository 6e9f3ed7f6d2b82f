import json
from typing import Any

import pytest

from phalanx.api.verification import outcome_of
from phalanx.cli.main import main
from phalanx.core.layout import Layout
from phalanx.data.synthetic import SyntheticStream
from phalanx.oracle.pool import RankPool
from phalanx.oracle.verify import Case, default_case


def verify_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of `phalanx verify --json`."""
    code = main(["verify", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.ranks
def test_the_document_has_what_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = verify_json(capsys, "--layout", "pp=2 mb=4", "--layout", "dp=1 mb=8")
    assert code == 0
    assert document["schema"] == 1
    assert document["passed"] is True
    assert [case["layout"] for case in document["cases"]] == [
        "dp=1 pp=2 tp=1 mb=4 precision=fp64",
        "dp=1 pp=1 tp=1 mb=8 precision=fp64",
    ]
    for case in document["cases"]:
        assert case["passed"] is True
        assert sorted(case["max_rel_error"]) == ["grad", "grad_norm", "loss", "weight"]
        assert max(case["max_rel_error"].values()) <= 1e-10
        assert case["seconds"] > 0


@pytest.mark.ranks
def test_one_line_tells_of_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--layout", "dp=1 mb=8", "--documents", "--steps", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1 layout, 1 step each against one device"
    assert said[2].startswith("pass ")
    assert said[2].endswith("dp=1 pp=1 tp=1 mb=8 precision=fp64 | documents")
    assert said[3].startswith("all the same as one device")


# So large a rate makes of a difference in the last digit one in the first, within a few steps.
DIVERGES = ("--layout", "dp=1 mb=4", "--set", "recipe.learning_rate=100", "--steps", "6")


@pytest.mark.ranks
def test_a_difference_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = verify_json(capsys, *DIVERGES)
    assert code == 4
    assert document["passed"] is False
    (case,) = document["cases"]
    assert case["complaints"]
    assert case["command"] == (
        "phalanx verify --layout 'dp=1 pp=1 tp=1 mb=4 precision=fp64' "
        "--set recipe.learning_rate=100 --steps 6"
    )


@pytest.mark.ranks
def test_a_difference_is_told_with_how_to_ask_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *DIVERGES]) == 4
    said = capsys.readouterr().out
    assert "FAIL" in said
    assert "is off by" in said
    assert "again: phalanx verify --layout" in said
    assert said.endswith("1 of 1 differ from one device\n")


class Breaks(Case):
    """A case during which a rank fails."""

    def stream(self) -> SyntheticStream:
        """None."""
        raise ZeroDivisionError("one over zero")


@pytest.mark.ranks
def test_a_rank_that_fails_is_a_difference_and_not_a_traceback(ranks: RankPool) -> None:
    outcome = outcome_of(ranks, Breaks(default_case(Layout()).run))
    assert not outcome.passed
    assert outcome.complaints == ["rank 0: ZeroDivisionError: one over zero"]


@pytest.mark.ranks
def test_a_sample_can_be_drawn_again_by_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    _, first = verify_json(capsys, "--sample", "2", "--max-ranks", "1", "--steps", "1")
    words = ["--sample", "2", "--max-ranks", "1", "--steps", "1", "--seed", str(first["seed"])]
    _, second = verify_json(capsys, *words)
    for case in (*first["cases"], *second["cases"]):
        del case["seconds"]
    assert first == second


@pytest.mark.ranks
def test_values_that_are_set_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--layout", "dp=1", "--set", "model.vocab=97", "--set", "layout.mb=8")
    _, document = verify_json(capsys, *words, "--masked", "holes", "--steps", "1")
    (case,) = document["cases"]
    assert case["layout"] == "dp=1 pp=1 tp=1 mb=8 precision=fp64"
    assert case["set"] == ["model.vocab=97"]
    assert case["masked"] == "holes"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--layout", "tp=3"], 3, "'tp=3': 4 heads cannot be split over tp=3; tp can be 1, 2, 4"),
        (["--layout", "dp=64"], 3, "'dp=64' needs 64 ranks, and --max-ranks is 8"),
        (["--layout", "cp=4 context=ulysses"], 3, "4 heads and 2 kv heads of a tp rank over cp=4"),
        (["--layout", "pp=2 v=2"], 3, "needs v to be 1, not v=2"),
        (["--layout", "schedule=interleaved"], 3, "needs pp to be at least 2, not pp=1"),
        (["--layout", "dp=3", "--set", "recipe.batch=7"], 3, "the batch can be 6 or 9"),
        (["--layout", "dq=2"], 2, "'dq'; did you mean dp"),
        (["--layout", "dp=2", "--sample", "3"], 2, "make one at a time"),
        (["--sample", "0"], 2, "--sample is 0; it is at least 1"),
        (["--steps", "0"], 2, "--steps is 0; it is at least 1"),
        (["--seed", "1"], 2, "--seed is of a sample; add --sample 12"),
        (["--set", "model.lyers=3"], 2, "unknown key in [model] 'lyers'; did you mean layers"),
        (["--set", "modle.layers=3"], 2, "unknown table 'modle'; did you mean model?"),
        (["--set", "data.path=x"], 2, "changes nothing here: the oracle makes up its batches"),
        (["--set", "model.name=llama-3.1-8b"], 2, "the oracle compares small models"),
        (["--set", "layers"], 2, "write section.key=value"),
        (["--masked", "some"], 2, "--masked"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert main(["verify", *words]) == code
    streams = capsys.readouterr()
    assert message in streams.err
    assert streams.err.count("\n") == 1
    assert streams.out == ""
