"""The page of a report: one file that asks nobody for anything, whatever a run is called."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_runs import RECORDED, read_lines, rewrite, write_lines

import phalanx
from phalanx.cli.main import main
from phalanx.reports.difference import ReportDifference
from phalanx.reports.page import difference_page, report_page

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(1)>'
PLAIN = "p<b onclick=x>'&amp;"  # what a folder can be called


class Tags(HTMLParser):
    """Collects tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose every text is markup."""
    folder = shutil.copytree(RECORDED, tmp_path / PLAIN)
    rewrite(folder / "events.jsonl", lambda line: {**line, "text": HOSTILE, "kind": "spike"})
    for name in ("env.json", "summary.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("AMD EPYC", HOSTILE.replace('"', "'")))
    rewrite(
        folder / "ranks.jsonl",
        lambda line: {
            **line,
            "messages": [{**m, "purpose": HOSTILE} for m in line["messages"]],
        },
    )
    return folder


def test_a_page_holds_no_script_and_no_request():
    page = report_page(phalanx.report(RECORDED))
    found = Tags(page)
    assert found.open == []
    assert not found.tags & {"script", "link", "img", "iframe", "object", "embed", "a", "form"}
    assert not found.attributes & {"src", "href", "action", "background", "style"}
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page


def test_whatever_a_run_says_is_inert(hostile: Path):
    plain, evil = (Tags(report_page(phalanx.report(path))) for path in (RECORDED, hostile))
    assert evil.open == []
    assert evil.tags <= plain.tags
    assert evil.attributes <= plain.attributes
    page = report_page(phalanx.report(hostile))
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_two_hostile_runs_are_inert_too(hostile: Path):
    both = ReportDifference(phalanx.report(hostile), phalanx.report(RECORDED))
    found = Tags(difference_page(both))
    assert found.open == []
    assert not found.tags & {"script", "img", "b"}


def test_whatever_a_run_says_cannot_command_a_terminal(
    copied: Path, capsys: pytest.CaptureFixture[str]
):
    evil = "\x1b[2J\x07red\r\n| x"
    rewrite(copied / "events.jsonl", lambda line: {**line, "text": evil})
    environment = json.loads((copied / "env.json").read_text())
    (copied / "env.json").write_text(json.dumps(environment | {"device": evil}))
    rewrite(
        copied / "ranks.jsonl",
        lambda line: {**line, "messages": [{**m, "purpose": evil} for m in line["messages"]]},
    )
    named = copied.rename(copied.with_name("a\x1b[2Jb"))
    for words in ([named], [named, RECORDED], [RECORDED, named]):
        for form in ("table", "markdown", "csv"):
            assert main(["report", *map(str, words), "--format", form]) == 0
            shown = capsys.readouterr().out
            assert not set(shown) & {"\x1b", "\x07", "\r"}
    for form in ("table", "markdown", "csv"):
        assert main(["doctor", str(named), "--format", form]) == 0
        assert not set(capsys.readouterr().out) & {"\x1b", "\x07", "\r"}


def test_a_long_run_makes_no_long_page(copied: Path):
    lines = read_lines(copied / "metrics.jsonl")
    more = [{**lines[-1], "step": n, "time": lines[-1]["time"] + n} for n in range(13, 5013)]
    write_lines(copied / "metrics.jsonl", [*lines, *more])
    event = read_lines(copied / "events.jsonl")[0]
    write_lines(copied / "events.jsonl", [{**event, "kind": "restart"}] * 2000)
    assert len(report_page(phalanx.report(copied))) < 200_000


def test_a_page_is_drawn_for_a_run_of_one_step_and_of_many(copied: Path):
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    (copied / "metrics.jsonl").write_text(lines[0] + "\n")
    (copied / "ranks.jsonl").unlink()
    assert "nan" not in report_page(phalanx.report(copied))
