"""What a page points to is there."""

import re
from pathlib import Path

import pytest
from pages import PACKAGE, ROOT, modules, pages

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
QUOTED = re.compile(r"`([^`\s]+)`")
PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*(/|\.(py|md|toml|csv|json|sh))")
DECISION = re.compile(r"docs/[\w/-]+\.md")
FROM = (ROOT, PACKAGE, PACKAGE / "trainer")  # where a path in a sentence may start
# What a run or a reader writes, and x for whichever one it is.
NOT_OURS = re.compile(r"(runs|checkpoints)/.*|(.*/)?x\.py")


def anchor(heading: str) -> str:
    """How GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        found = page if not path else (page.parent / path).resolve()
        assert found.exists(), f"{page.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in map(anchor, headings), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_in_backticks_exists(page: Path):
    for quoted in QUOTED.findall(page.read_text(encoding="utf-8")):
        if not PATH.fullmatch(quoted) or NOT_OURS.fullmatch(quoted) or "/" not in quoted:
            continue
        assert any(list(start.glob(quoted.rstrip("/"))) for start in FROM), (
            f"{page.name} names {quoted}, which is not there"
        )


def test_every_page_that_the_source_names_exists():
    for path in [*modules(), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for named in DECISION.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / named).exists(), f"{path.relative_to(ROOT)} names {named}"


def test_decisions_are_numbered_without_holes():
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for number, path in enumerate(decisions, 1):
        assert path.name.startswith(f"{number:04d}-")
        assert path.read_text(encoding="utf-8").startswith(f"# {number}. ")
