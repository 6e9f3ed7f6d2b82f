"""Writes docs/symbols.md from the legend in phalanx/core/symbols.py."""

from pathlib import Path

from phalanx.core.symbols import to_markdown

if __name__ == "__main__":
    Path(__file__).parent.parent.joinpath("docs", "symbols.md").write_text(to_markdown())
