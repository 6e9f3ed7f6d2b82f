"""Writes the page as static files that compute in the browser, by a Pyodide that the user has.

What is written is the same page, the same scripts but for where answers come from, and the package
itself as it is installed here. Any web server can publish the folder.
"""

import json
import os
import platform
import re
import shutil
import time
import zipfile
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from phalanx import __version__
from phalanx.core.errors import UsageError
from phalanx.explore.board import Board
from phalanx.explore.page import Dress, document
from phalanx.explore.state import State

ROOMS = (
    "core",
    "catalog",
    "schedules",
    "cost",
    "planner",
    "api",
    "explore",
)  # all that the page computes with
NEEDED = ("pyodide.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
EITHER = ("pyodide.asm.js", "pyodide.asm.mjs")  # by its version
PACKAGE = "numpy"  # the one dependency
HOW = "npm install pyodide has the core; a full release of Pyodide has the wheels too"
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'"
)
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip knows: the same input is the same file
EXPORTED = ("index.html", "phalanx.zip", "static", "pyodide")


class Runtime(NamedTuple):
    """A Pyodide in a folder.

    Attributes:
        files: that a page needs of it.
        version: of Pyodide; empty where the folder does not say.
        python: its version of Python.
        numpy: its version of numpy.
    """

    files: tuple[Path, ...]
    version: str
    python: str
    numpy: str


class Exported(NamedTuple):
    """What was written.

    Attributes:
        folder: where.
        runtime: the Pyodide that is in it.
        files: how many.
        bytes: of all of them.
    """

    folder: Path
    runtime: Runtime
    files: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The export as `--json` has it."""
        return {
            "schema": 1,
            "folder": str(self.folder),
            "files": self.files,
            "bytes": self.bytes,
            "version": __version__,
            "pyodide": self.runtime.version,
            "python": self.runtime.python,
            "numpy": self.runtime.numpy,
        }


def runtime_in(folder: Path) -> Runtime:
    """The Pyodide in a folder, with a numpy that was built for it.

    Args:
        folder: of the npm package `pyodide`, or of a full release.

    Raises:
        UsageError: something is missing; the message names it.
    """
    if not folder.is_dir():
        raise UsageError(f"--pyodide {folder}: no such folder; {HOW}")
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    joint = [name for name in EITHER if (folder / name).is_file()]
    missing += [] if joint else [EITHER[0]]
    if missing:
        raise UsageError(f"{folder} is no Pyodide: it has no {', '.join(missing)}; {HOW}")
    try:
        lock = json.loads((folder / "pyodide-lock.json").read_text(encoding="utf-8"))
        package, python = lock["packages"][PACKAGE], lock["info"]["python"]
        wheels = [
            package["file_name"],
            *(lock["packages"][n]["file_name"] for n in package["depends"]),
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder}/pyodide-lock.json names no {PACKAGE} ({error}); {HOW}"
        ) from error
    lost = [name for name in wheels if not (folder / Path(name).name).is_file()]
    if lost:
        raise UsageError(
            f"{folder} has no {lost[0]}, which its pyodide-lock.json names; put the file of the same release of Pyodide there: {HOW}"
        )
    names = (*NEEDED, *joint, *wheels)
    found = tuple(folder / Path(name).name for name in names)
    return Runtime(found, _version_of(folder), str(python), str(package["version"]))


def _version_of(folder: Path) -> str:
    """The version of a Pyodide, by its package.json; empty where there is none."""
    try:
        return str(json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def export(state: State, folder: Path, pyodide: Path) -> Exported:
    """Write the page for a state to a folder.

    Args:
        state: with which it opens.
        folder: new, or one that an earlier export wrote.
        pyodide: the folder of a Pyodide.

    Raises:
        UsageError: the folder has other things in it, or there is no whole Pyodide.
    """
    runtime = runtime_in(pyodide)
    _require_ours(folder)
    for part in ("static", "pyodide"):
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir(parents=True)
    (folder / "index.html").write_text(page(state, runtime), encoding="utf-8")
    _copy_scripts(folder / "static")
    for file in runtime.files:
        shutil.copyfile(file, folder / "pyodide" / file.name)
    _pack(folder / "phalanx.zip")
    written = [path for path in folder.rglob("*") if path.is_file()]
    return Exported(folder, runtime, len(written), sum(path.stat().st_size for path in written))


def _require_ours(folder: Path) -> None:
    """Refuse to write over what is not ours."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--export {folder} is a file; name a new folder")
    others = {path.name for path in folder.iterdir()} - {*EXPORTED} if folder.exists() else set()
    if others:
        raise UsageError(
            f"{folder} holds {sorted(others)[0]}, which no export wrote; name a new folder"
        )


def page(state: State, runtime: Runtime) -> str:
    """The document of an exported page.

    Args:
        state: with which it opens.
        runtime: the Pyodide beside it.
    """
    mebibytes = sum(file.stat().st_size for file in runtime.files) / 2**20
    day = time.strftime(
        "%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    )
    engine = f"Pyodide {runtime.version}".strip()
    dress = Dress(
        head=f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n',
        offline=(
            '<div id="offline" class="notice" role="status" hidden>Python is on its way into this browser '
            f"({mebibytes:.0f} MiB, once). The numbers stand already; in some seconds they can be dragged.</div>"
        ),
        stated=(
            f"<p>Written on {day} by Phalanx {escape(__version__)}, checked with Python {escape(platform.python_version())}. It computes in your "
            f"browser, by {escape(engine)} (Python {escape(runtime.python)}, numpy {escape(runtime.numpy)}), and asks nobody else.</p>"
        ),
        has_form=False,
    )
    return document(Board().shown(state), list(state.problems), dress)


def _copy_scripts(folder: Path) -> None:
    """Those of the page, then those that answer without a server."""
    here = files("phalanx.explore")
    for room in ("static", "exported"):
        for entry in (here / room).iterdir():
            if entry.is_file():
                (folder / entry.name).write_bytes(entry.read_bytes())


def _pack(path: Path) -> None:
    """The rooms of the package that the page computes with, as one archive that is always the same."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(_contents()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content, zipfile.ZIP_DEFLATED)


def _contents() -> Iterator[tuple[str, bytes]]:
    root = files("phalanx")
    yield "phalanx/__init__.py", (root / "__init__.py").read_bytes()
    for room in ROOMS:
        yield from _below(root / room, f"phalanx/{room}")


def _below(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        inside = f"{name}/{entry.name}"
        if entry.is_dir() and not re.fullmatch(r"__pycache__|static|exported", entry.name):
            yield from _below(entry, inside)
        elif entry.is_file() and not entry.name.endswith(".pyc"):
            yield inside, entry.read_bytes()
