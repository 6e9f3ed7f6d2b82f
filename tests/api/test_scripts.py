"""What a script may look like that starts ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import phalanx

print("once")
verdict = phalanx.verify("dp=2", steps=1, recipe={"batch": 2})
print(verdict.passed)
"""


@pytest.mark.ranks
def test_a_script_that_starts_ranks_needs_no_guard_and_runs_once(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["once", "True"]
