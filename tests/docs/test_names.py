"""One name, one thing: no two classes share a name, and the field's words are ours."""

import ast
import re
from collections import defaultdict
from functools import cache

import pytest
from pages import PACKAGE, ROOT, classes, modules, pages, words_of

# Our own words where the field has one, by what the field says. A word that no name has any more
# goes from `DYING` to `GONE`, and never comes back, in no name and on no page.
GONE = {
    "arm": "enable",
    "contender": "candidate",
    "habits": "framework profile",
    "hopeful": "optimistic",
    "mend": "suggest fix",
    "napkin": "heuristic baseline",
    "practice": "framework profile",
    "settle": "wait",
    "sharpened": "reference precision",
    "twins": "replicas",
    "wires": "links",
}
DYING = {"cover": "overlap budget", "pace": "fast simulation"}


@cache
def names() -> dict[str, list[str]]:
    """Every identifier that the package defines, with the modules that do."""
    found = defaultdict(list)
    for path in modules():
        where = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name].append(where)
            elif isinstance(node, ast.arg):
                found[node.arg].append(where)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[node.id].append(where)
    return found


def test_every_class_name_exists_once():
    homes = defaultdict(set)
    for name, where in classes():
        homes[name].add(where)
    shared = {name: sorted(where) for name, where in homes.items() if len(where) > 1}
    assert shared == {}, "a name means one thing; give one of these another"


@pytest.mark.parametrize("word", sorted(GONE))
def test_where_the_field_has_a_word_ours_is_gone(word: str):
    used = {name: where for name, where in names().items() if word in words_of(name)}
    assert used == {}, f"the field says {GONE[word]}"
    for page in pages():
        if page.name != "CHANGELOG.md":
            text = page.read_text(encoding="utf-8")
            assert not re.search(rf"\b{word}\b", text, re.IGNORECASE), page.relative_to(ROOT)


def test_a_word_that_no_name_has_any_more_is_gone():
    used = {word for name in names() for word in words_of(name)}
    assert set(DYING) - used == set(), "move these to GONE"
