"""Writes the pages of docs/ that are printed from the code; a test holds each equal to it."""

from pathlib import Path

from phalanx.api.pages import PAGES

if __name__ == "__main__":
    for name, to_markdown in PAGES.items():
        Path(__file__).parent.parent.joinpath("docs", name).write_text(to_markdown())
