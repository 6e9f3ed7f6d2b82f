"""Which features go together is asked of those who own them, and written down as it is."""

from pathlib import Path

from phalanx.core.layout import Layout
from phalanx.oracle.compose import LAYOUTS, MODELS, pairs, to_markdown, together

TABLE = Path(__file__).parents[2] / "docs" / "composition.md"


def test_the_table_in_the_documents_is_what_the_program_says() -> None:
    assert TABLE.read_text() == to_markdown(), "run tools/composition.py"


def test_every_two_features_are_a_case_or_a_refusal_with_a_reason() -> None:
    found = list(pairs())
    count = len(LAYOUTS) + len(MODELS)
    assert len(found) == count * (count - 1) // 2
    assert all(pair.refusal for pair in found if pair.refusal is not None)


def test_cases_have_both_features_and_fit() -> None:
    found = together(max_ranks=4)
    assert any("tp=2" in q.layout and "zero=3" in q.layout for q in found)
    assert any("experts" in q.features and "dropout" in q.features for q in found)
    assert max(Layout.parse(q.layout).ranks for q in found) == 4
    assert len({(q.layout, q.features) for q in found}) == len(found)
