import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

import phalanx
from phalanx import __version__
from phalanx.cli.main import COMMANDS, main

Captured = pytest.CaptureFixture[str]
TRAINING = ("torch", "safetensors")


def fails(capsys: Captured, code: int, *words: str) -> str:
    """Run a command line that must fail with one line on stderr, and return it."""
    assert main(words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err)
    return err


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_names_every_command_and_exit_code(capsys: Captured, words: tuple[str, ...]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in COMMANDS)
    assert all(re.search(rf"\b{code}  ", shown) for code in (0, 1, 2, 3, 4, 75))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(capsys: Captured, name: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main((name, "--help"))
    assert ended.value.code == 0
    assert f"usage: phalanx {name}" in capsys.readouterr().out


def test_version(capsys: Captured) -> None:
    assert main(("--version",)) == 0
    assert capsys.readouterr().out == f"phalanx {__version__}\n"


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys; from phalanx.cli.main import main; main(['--help']); "
        "heavy = {'torch', 'numpy', 'rich'} & set(sys.modules); "
        "ours = [m for m in sys.modules if m.startswith('phalanx.')]; "
        "print(heavy, ours, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    heavy, ours = done.stderr.strip().split(" ", 1)
    assert heavy == "set()"
    assert not any(f"phalanx.cli.{name}'" in ours for name in COMMANDS)


def test_help_is_there_in_a_third_of_a_second() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "phalanx", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_an_unknown_command_is_answered_with_the_nearest(capsys: Captured) -> None:
    assert fails(capsys, 2, "trian") == "error: unknown command 'trian'; did you mean train?\n"


def test_an_unknown_option_is_answered_with_the_nearest(capsys: Captured) -> None:
    assert "did you mean --layout" in fails(capsys, 2, "train", "--layuot", "tp=2")


def test_a_word_too_many_is_named(capsys: Captured) -> None:
    assert "'b.toml'" in fails(capsys, 2, "train", "a.toml", "b.toml", "--dry-run")


def test_a_value_of_the_wrong_kind_is_one_line(capsys: Captured) -> None:
    assert "'four'" in fails(capsys, 2, "train", "--ranks", "four")


def test_a_command_line_may_not_be_abbreviated(capsys: Captured) -> None:
    assert "--lay" in fails(capsys, 2, "train", "--lay", "tp=2")


def test_with_json_an_error_is_a_document_too(capsys: Captured) -> None:
    assert main(("train", "--layout", "tp=3", "--dry-run", "--json")) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["exit_code"] == 3
    assert err == f"error: {document['error']}\n"


@pytest.fixture
def without_torch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in an installation that has everything but the training packages."""
    site = tmp_path / "site"
    site.mkdir()
    for package in Path(numpy.__file__).parents[1].iterdir():
        if not package.name.startswith(TRAINING):
            (site / package.name).symlink_to(package)
    path = os.pathsep.join([str(site), str(Path(phalanx.__file__).parents[1])])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-m", "phalanx", *words]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )

    return run


def test_without_torch_training_says_what_to_install(without_torch) -> None:
    done = without_torch("train")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*pip install 'phalanx\[train\]'\n", done.stderr)


def test_without_torch_a_dry_run_still_plans(without_torch) -> None:
    done = without_torch("train", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "dp=1 pp=2 tp=2" in done.stdout


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m phalanx models | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Callable[[], int]:
        raise ModuleNotFoundError("no module named nonsense", name="nonsense")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ModuleNotFoundError):
        main(("train",))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", ["models", "--help", "schedule 1f1b -p 2 -m 2", "models nothing"])
def test_closed_streams_are_harmless(closed: str, words: str) -> None:
    program = f"{sys.executable} -m phalanx {words} {closed}"
    done = subprocess.run(["sh", "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == (2 if "nothing" in words else 0)
    assert "Traceback" not in done.stderr


def test_what_is_not_utf_8_is_one_line(capsys: Captured) -> None:
    assert "is not text in UTF-8" in fails(capsys, 2, "models", "bad\udcff")


def test_a_lack_of_memory_is_one_line() -> None:
    program = (
        "import resource, sys; from phalanx.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20)); "
        "sys.exit(main(['verify', '--layout', 'dp=1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
