import json
import subprocess
from pathlib import Path

import pytest

from phalanx.cli.completion import whole_parser
from phalanx.cli.main import COMMANDS, main

Captured = pytest.CaptureFixture[str]


def completed(script: Path, words: list[str]) -> list[str]:
    """What bash offers after these words."""
    line = " ".join(words)
    code = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        f"COMP_LINE='{line}'; COMP_POINT={len(line)}; _shtab_phalanx; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_and_their_options(tmp_path: Path, capsys: Captured):
    pytest.importorskip("shtab")
    assert main(["completion", "bash", "--json"]) == 0
    script = tmp_path / "phalanx.bash"
    script.write_text(json.loads(capsys.readouterr().out)["script"])
    assert completed(script, ["phalanx", "dri"]) == ["drill"]
    assert "--warning" in completed(script, ["phalanx", "launch", "slurm", "--w"])


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_all_commands(shell: str, capsys: Captured):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_one_parser_has_every_command():
    text = whole_parser().format_help()
    assert all(name in text for name in COMMANDS)
