"""A copy of a run for every test that changes one."""

import shutil
from pathlib import Path

import pytest
from recorded_runs import RECORDED


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The run, to be written to."""
    return shutil.copytree(RECORDED, tmp_path / "copied")
