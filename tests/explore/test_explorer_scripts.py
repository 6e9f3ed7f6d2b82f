"""The scripts of the page, as TypeScript's compiler reads them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

EXPLORE = Path(__file__).parents[2] / "phalanx" / "explore"
STATIC = EXPLORE / "static"
PYODIDE = """
/** @param {{indexURL: string}} _where @returns {Promise<any>} */
export async function loadPyodide(_where) {}
"""
STRICT = "--noEmit --checkJs --allowJs --strict --target es2022 --module es2022"


@pytest.mark.parametrize("where", ["served", "exported"])
def test_types_of_the_scripts_hold(where: str, tmp_path: Path):
    compiler = shutil.which("tsc")
    if compiler is None:
        pytest.skip("no tsc here: npm install --global typescript")
    folder = tmp_path / "static"
    shutil.copytree(STATIC, folder)
    if where == "exported":
        shutil.copytree(EXPLORE / "exported", folder, dirs_exist_ok=True)
        (tmp_path / "pyodide").mkdir()
        (tmp_path / "pyodide" / "pyodide.mjs").write_text(PYODIDE)
    scripts = sorted(str(path) for path in folder.glob("*.js"))
    command = [compiler, *STRICT.split(), "--lib", "es2022,dom,dom.iterable", *scripts]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_no_script_asks_another_machine_or_runs_text_as_code():
    for path in [*STATIC.glob("*.js"), *(EXPLORE / "exported").glob("*.js")]:
        text = path.read_text()
        assert not re.search(r"https?://|\beval\(|new Function|document\.write", text), path.name


def test_scripts_and_styles_weigh_less_than_200_kb():
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 200_000
