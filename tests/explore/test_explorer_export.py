"""The page as static files: what is packed answers as the server does, also in a browser."""

import functools
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from test_explorer_state import some_state

import phalanx
from phalanx.cli.main import main
from phalanx.core.errors import UsageError
from phalanx.explore.answers import answer
from phalanx.explore.board import Board
from phalanx.explore.export import export, runtime_in
from phalanx.explore.searching import found_by
from phalanx.explore.state import State

BOARD = Board()
NUMPY = "numpy-2.2.5-cp313-cp313-pyodide_2025_0_wasm32.whl"
LOCK = {
    "info": {"python": "3.13.2"},
    "packages": {"numpy": {"file_name": NUMPY, "version": "2.2.5", "depends": []}},
}
WANTED = "no Pyodide with its numpy here: PHALANX_PYODIDE=FOLDER of a full release runs this"
ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from phalanx.explore import local
answers = [local.asked(f"state?{query}")[1].decode() for query in json.load(sys.stdin)]
strange = [name for name, module in sys.modules.items() if name.partition(".")[0] == "phalanx"
           and not module.__file__.startswith(sys.argv[1])]
print(json.dumps([answers, strange, local.asked("grade?problem=q2p&answer=26GB")[1].decode()]))
"""


def state_text(query: str) -> str:
    """Every record of a state, as the server sends it."""
    return answer("state", query, BOARD).body.decode()


@pytest.fixture(scope="module")
def empty_runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names of a Pyodide, and nothing in its files."""
    folder = tmp_path_factory.mktemp("pyodide")
    for name in ("pyodide.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide.asm.js", NUMPY):
        (folder / name).write_bytes(b"")
    (folder / "pyodide-lock.json").write_text(json.dumps(LOCK))
    (folder / "package.json").write_text('{"version": "0.29.3"}')
    return folder


def test_what_is_packed_answers_alone_as_the_server_does(tmp_path: Path, empty_runtime: Path):
    export(State(), tmp_path / "site", empty_runtime)
    with zipfile.ZipFile(tmp_path / "site" / "phalanx.zip") as archive:
        archive.extractall(tmp_path / "code")
    queries = ["", *(some_state(seed).query() for seed in range(12))]
    command = [sys.executable, "-I", "-c", ALONE, str(tmp_path / "code")]
    found = subprocess.run(
        command, input=json.dumps(queries), capture_output=True, text=True, check=True
    )
    answers, strange, grade = json.loads(found.stdout)
    assert answers == [state_text(query) for query in queries]
    assert strange == []
    assert json.loads(grade)["verdict"] == "good"


def test_an_export_says_what_it_is_and_asks_nobody(
    tmp_path: Path, empty_runtime: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    first = export(State.parse("v1&tp=16"), tmp_path / "a", empty_runtime)
    text = (first.folder / "index.html").read_text()
    assert f"Written on 2023-11-14 by Phalanx {phalanx.__version__}" in text
    assert "Pyodide 0.29.3 (Python 3.13.2, numpy 2.2.5)" in text
    assert "AI-Hypercomputer/maxtext" in text  # a source of the catalog
    assert 'data-query="v1&amp;tp=16"' in text
    assert not re.search(r"(src|href)=.?(https?:)?//|\[\[", text)
    second = export(State.parse("v1&tp=16"), tmp_path / "b", empty_runtime)
    for name in ("index.html", "phalanx.zip"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_a_second_export_goes_over_the_first_and_over_nothing_else(
    tmp_path: Path, empty_runtime: Path
):
    export(State(), tmp_path, empty_runtime)
    export(State(), tmp_path, empty_runtime)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds thesis.tex"):
        export(State(), tmp_path, empty_runtime)


@pytest.mark.parametrize("lost", ["pyodide.mjs", "pyodide.asm.js", "pyodide-lock.json", NUMPY])
def test_a_missing_file_is_named(tmp_path: Path, empty_runtime: Path, lost: str):
    for file in empty_runtime.iterdir():
        if file.name != lost:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match=re.escape(lost)):
        runtime_in(tmp_path)


def test_half_a_question_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explore", "--export", str(tmp_path / "site")]) == 2
    assert "--pyodide FOLDER" in capsys.readouterr().err
    assert main(["explore", "--export", str(tmp_path / "site"), "--pyodide", str(tmp_path)]) == 2
    assert not (tmp_path / "site").exists()


class Quiet(SimpleHTTPRequestHandler):
    """A static server that says nothing."""

    def log_message(self, *_said: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where an exported page is served, by nothing but files."""
    given = os.environ.get("PHALANX_PYODIDE")
    if not given:
        pytest.skip(WANTED)
    folder = tmp_path_factory.mktemp("export") / "site"
    export(State(), folder, Path(given))
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def exported(site: str, browser: Browser) -> Iterator[Page]:
    """The exported page, with Python in it; it may say nothing and ask nobody else."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: request.url.startswith(site) or said.append(request.url))
    page.goto(f"{site}?v1&tp=16&colour=red")
    page.wait_for_selector("body[data-ready]", timeout=240_000)
    yield page
    page.close()
    assert said == []


ASK_ALL = """
async (queries) => {
  const { ask } = await import("./static/source.js"), found = [];
  for (const query of queries) found.push(await (await ask(`state?${query}`)).text());
  return found;
}
"""


def differing(here: str, there: str) -> list[str]:
    """Records that differ: in any byte; those of the planner, in more than the last bits of a sum.

    numpy adds up in an order that is the processor's own, so a sum of many terms can end otherwise.
    """
    ours, theirs = json.loads(here)["records"], json.loads(there)["records"]
    assert ours.keys() == theirs.keys()
    found = []
    for name, record in ours.items():
        other = theirs[name]
        if name.startswith("est.") and isinstance(record["value"], float):
            other = {**other, "value": pytest.approx(other["value"], rel=1e-14)}
        if record != other:
            found.append(name)
    return found


def test_a_browser_computes_the_same_records(exported: Page):
    queries = ["", *(some_state(seed).query() for seed in range(100))]
    for begun in range(0, len(queries), 10):
        some = queries[begun : begun + 10]
        for query, there in zip(some, exported.evaluate(ASK_ALL, some), strict=True):
            assert differing(state_text(query), there) == [], query


def test_an_exported_page_opens_at_its_address_and_moves(exported: Page):
    tp = exported.locator(".top .scrub[data-k=tp]")
    expect(tp).to_have_text("16")
    expect(exported.locator("#notice")).to_contain_text("colour")
    tp.focus()
    exported.keyboard.press("ArrowDown")
    expect(tp).to_have_text("8")
    exported.locator("#tensor").scroll_into_view_if_needed()
    records = json.loads(state_text("v1"))["records"]
    expect(exported.locator('#tensor [data-r="tp.ratio"]')).to_have_text(
        records["tp.ratio"]["text"]
    )
    form = exported.locator('[data-problem="q2p"]')
    form.locator("input").fill("26 GB")
    form.locator("button").click()
    expect(form.locator(".grade")).to_contain_text("right")
    exported.locator("#runs").scroll_into_view_if_needed()
    expect(exported.locator("#runlist")).to_contain_text("opens no folders", timeout=10_000)


def test_an_exported_page_searches_in_a_worker_that_can_be_stopped(exported: Page):
    query = "v1&model=llama-3.1-8b&B=1M&dp=8&tp=8&pp=1&whynot=tp=8"
    exported.goto(exported.url.partition("?")[0] + f"?{query}#plan")
    exported.wait_for_selector("body[data-ready]", timeout=240_000)
    exported.locator('[data-do="search"]').click()
    exported.locator('[data-do="stop"]').click()
    expect(exported.locator("#searching")).to_have_text("stopped")
    exported.locator('[data-do="search"]').click()
    best = exported.locator("#found .best code")
    expect(best).to_be_visible(timeout=240_000)
    here = re.search(r'class="best">.*?<code>(.*?)</code>', found_by(query)["html"])
    assert here is not None
    expect(best).to_have_text(here[1])
