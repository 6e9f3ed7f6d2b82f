"""Pages that are printed from the code say what the code says."""

import pytest
from pages import ROOT

from phalanx.api.pages import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str):
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run: python tools/pages.py"
