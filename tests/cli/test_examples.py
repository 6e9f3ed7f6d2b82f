"""Run files that users start from can be run."""

from pathlib import Path

import pytest

from phalanx.cli.main import main

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(path), "--dry-run"]) == 0
    assert "ranks" in capsys.readouterr().out
