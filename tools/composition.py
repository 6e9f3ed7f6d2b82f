"""Writes docs/composition.md: which features go together, and why others do not."""

from pathlib import Path

from phalanx.oracle.compose import to_markdown

if __name__ == "__main__":
    Path(__file__).parent.parent.joinpath("docs", "composition.md").write_text(to_markdown())
