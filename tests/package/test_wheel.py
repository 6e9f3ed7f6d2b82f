"""What is published: a wheel that plans without torch, built of a source archive."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import rich

ROOT = Path(__file__).parents[2]
BASE = ("numpy", "numpy.libs", "rich", "markdown_it", "mdurl", "pygments")  # and nothing else
BUILD = "import setuptools.build_meta as b; b.build_{what}('dist')"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel, built of the source archive, and of that."""
    home = tmp_path_factory.mktemp("built")
    source = home / "source"
    source.mkdir()
    for name in ("phalanx", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / name)
    build(source, "sdist")
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(home, filter="data")
    unpacked = home / archive.name.removesuffix(".tar.gz")
    build(unpacked, "wheel")
    return unpacked / "dist"


def build(source: Path, what: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", BUILD.format(what=what)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_everything_that_is_read_at_run_time(built: Path):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "phalanx").rglob("*"):
        relative = path.relative_to(ROOT).as_posix()
        if path.is_file() and "__pycache__" not in relative:
            assert relative in names, f"{relative} is not in the wheel"
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]


@pytest.fixture(scope="module")
def clean(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it asks for, and nothing else."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home / "env", symlinks=True)
    (packages,) = (home / "env").glob("lib/python*/site-packages")
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    installed = Path(np.__file__).parents[1]
    assert installed == Path(rich.__file__).parents[1]
    for name in BASE:
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    return home / "env" / "bin" / "python"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--help"], 0, "usage: phalanx"),
        (["plan", "llama-3.1-8b", "h100x8", "--tokens", "1Mi", "--json"], 0, '"step_seconds"'),
        (["schedule", "1f1b", "-p", "2", "-m", "4"], 0, "bubble"),
        (["help", "zero"], 0, "zero"),
        (["train"], 1, "pip install 'phalanx[train]'"),
        (["explore", "--no-browser"], 1, "pip install 'phalanx[explore]'"),
        (["completion", "bash"], 1, "pip install 'phalanx[completion]'"),
    ],
)
def test_a_clean_environment_plans_without_torch(
    clean: Path, tmp_path: Path, words: list[str], code: int, told: str
):
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(clean), "-m", "phalanx", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr


def test_every_extra_says_what_it_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == ["numpy>=1.26", "rich>=13.7"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in page, f"docs/install.md does not say what {extra} is for"


def test_the_version_is_one():
    import phalanx

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert project["version"] == phalanx.__version__
    assert f"version: {phalanx.__version__}\n" in citation
