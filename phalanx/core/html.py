"""Small tables in HTML, for notebooks: what `_repr_html_` of a result gives."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(caption: str, rows: Iterable[Sequence[object]], headers: Sequence[str] = ()) -> str:
    """A table; every text in it is escaped.

    Args:
        caption: what the table is about.
        rows: of cells, from left to right.
        headers: of the columns; without any, the first cell of each row is its header.

    Example:
        >>> html_table("a < b", [("loss", 1.5)])
        '<table><caption>a &lt; b</caption><tr><th>loss</th><td>1.5</td></tr></table>'
    """
    head = "".join(f"<th>{escape(str(text))}</th>" for text in headers)
    lines = [f"<tr>{head}</tr>"] if headers else []
    lines += [f"<tr>{_cells(row, first='td' if headers else 'th')}</tr>" for row in rows]
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def _cells(row: Sequence[object], first: str) -> str:
    tags = [first, *("td" for _ in row[1:])]
    return "".join(
        f"<{tag}>{escape(str(cell))}</{tag}>" for tag, cell in zip(tags, row, strict=True)
    )
