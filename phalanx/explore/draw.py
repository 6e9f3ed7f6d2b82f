"""Draws bars, curves, blocks and timelines as SVG, from fractions of the picture.

Positions are percentages of the width, so that a picture fits any screen while its text keeps its
size; colours are classes of the style sheet, so that both themes and print follow by themselves.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

BAR = 18  # pixels
FLOOR = 0.9  # of the height of a plot; tick labels stand below


class BarPiece(NamedTuple):
    """One stretch of a bar: how much of the whole, in what colour, and what it is."""

    share: float
    colour: str
    title: str = ""


class Bar(NamedTuple):
    """A row of a bar chart."""

    name: str
    pieces: Sequence[BarPiece]
    text: str
    note: str = ""


class Curve(NamedTuple):
    """A curve of a plot, through points of fractions (x, y), y upwards."""

    points: Sequence[tuple[float, float]]
    colour: str
    name: str = ""
    dashed: bool = False


class Mark(NamedTuple):
    """A vertical line, or a dot where y is given."""

    x: float
    colour: str
    name: str = ""
    y: float | None = None
    drag: str = ""


class Tick(NamedTuple):
    """A label at a fraction of an axis."""

    at: float
    text: str


def percent(fraction: float) -> str:
    """A fraction as SVG writes it, held within the picture; never NaN."""
    held = max(0.0, min(1.0, fraction)) if math.isfinite(fraction) else 1.0
    return f"{round(100 * held, 3):g}%"


def bars(rows: Iterable[Bar], limit: float | None = None) -> str:
    """Stacked bars, one to a row, with a name before and a number behind.

    Args:
        rows: from top to bottom.
        limit: a fraction at which a line stands: a capacity.
    """
    return '<div class="bars">' + "".join(_bar(row, limit) for row in rows) + "</div>"


def _bar(row: Bar, limit: float | None) -> str:
    begun, parts = 0.0, []
    for piece in row.pieces:
        parts.append(
            f'<rect x="{percent(begun)}" y="2" width="{percent(min(piece.share, 1 - begun))}" '
            f'height="{BAR - 4}" class="c-{escape(piece.colour)}">'
            f"<title>{escape(piece.title)}</title></rect>"
        )
        begun += max(piece.share, 0.0)
    if limit is not None:
        at = percent(limit)
        parts.append(f'<line x1="{at}" x2="{at}" y1="0" y2="{BAR}" class="limit"/>')
    note = f'<span class="barnote">{escape(row.note)}</span>' if row.note else ""
    return (
        f'<div class="barrow"><span class="barname">{escape(row.name)}</span>'
        f'<svg class="bar" width="100%" height="{BAR}" aria-hidden="true">{"".join(parts)}</svg>'
        f'<span class="bartext">{escape(row.text)}</span>{note}</div>'
    )


def plot(
    lines: Sequence[Curve],
    marks: Sequence[Mark] = (),
    ticks: tuple[Sequence[Tick], Sequence[Tick]] = ((), ()),
    titles: tuple[str, str] = ("", ""),
    height: int = 230,
) -> str:
    """Curves over a grid, with marks, tick labels and a legend.

    Args:
        lines: of fractions.
        marks: lines and dots.
        ticks: of x and of y.
        titles: of x and of y.
        height: pixels.
    """
    grid = [_gridline(t, vertical=True) for t in ticks[0]]
    grid += [_gridline(t, vertical=False) for t in ticks[1]]
    paths = "".join(_path(line) for line in lines if len(line.points) > 1)
    drawn = (
        f'<svg class="plot" width="100%" height="{height}" aria-hidden="true">{"".join(grid)}'
        f'<svg width="100%" height="100%" viewBox="0 0 1000 1000" preserveAspectRatio="none">'
        f"{paths}</svg>{''.join(_mark(m) for m in marks)}</svg>"
    )
    names = [(line.name, line.colour) for line in lines if line.name]
    return (
        f'<div class="plotbox"><div class="ytitle">{escape(titles[1])}</div>{drawn}'
        f'<div class="xtitle">{escape(titles[0])}</div>{legend(names)}</div>'
    )


def legend(names: Iterable[tuple[str, str]]) -> str:
    """What colours stand for.

    Args:
        names: texts and colours.
    """
    items = "".join(
        f'<span class="key"><svg width="12" height="12" aria-hidden="true"><rect width="12" '
        f'height="12" rx="2" class="c-{escape(colour)}"/></svg>{escape(name)}</span>'
        for name, colour in names
    )
    return f'<div class="legend">{items}</div>' if items else ""


def _gridline(tick: Tick, *, vertical: bool) -> str:
    text = escape(tick.text)
    if vertical:
        x = percent(tick.at)
        anchor = "start" if tick.at < 0.04 else "end" if tick.at > 0.96 else "middle"
        return (
            f'<line x1="{x}" x2="{x}" y1="0" y2="{percent(FLOOR)}" class="grid"/>'
            f'<text x="{x}" y="99%" text-anchor="{anchor}">{text}</text>'
        )
    y = percent(_down(tick.at))
    return f'<line x1="0" x2="100%" y1="{y}" y2="{y}" class="grid"/><text x="2" y="{y}" dy="-3">{text}</text>'


def _down(y: float) -> float:
    """Fractions count upwards, pixels downwards."""
    return FLOOR * (1 - max(0.0, min(1.0, y)))


def _path(line: Curve) -> str:
    points = " ".join(f"{1000 * x:.1f},{1000 * _down(y):.1f}" for x, y in line.points)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    return f'<polyline points="{points}" class="s-{line.colour}" vector-effect="non-scaling-stroke"{dash}/>'


def _mark(mark: Mark) -> str:
    x = percent(mark.x)
    anchor = "end" if mark.x > 0.7 else "start"
    dx = -6 if anchor == "end" else 6
    name = f'<text x="{x}" y="80%" dx="{dx}" text-anchor="{anchor}">{escape(mark.name)}</text>'
    if mark.y is None:
        return f'<line x1="{x}" x2="{x}" y1="0" y2="{percent(FLOOR)}" class="s-{mark.colour} mark"/>{name if mark.name else ""}'
    y = percent(_down(mark.y))
    drag = f' data-drag="{escape(mark.drag)}"' if mark.drag else ""
    halo = f'<circle cx="{x}" cy="{y}" r="16" class="halo"{drag}/>' if mark.drag else ""
    return f'{halo}<circle cx="{x}" cy="{y}" r="6" class="c-{mark.colour} dot"/>'


def head_cell(text: str) -> str:
    """A header of a column; a column without one has an empty cell."""
    return f'<th scope="col">{escape(text)}</th>' if text else "<td></td>"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """The table behind a picture.

    Args:
        headers: of the columns.
        rows: of cells.
        caption: what it is about.
    """
    head = "".join(head_cell(text) for text in headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


class LogScale(NamedTuple):
    """A logarithmic axis from low to high."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Where a value stands, as a fraction that may lie outside 0 to 1."""
        if value <= 0:
            return 0.0
        return math.log(value / self.low) / math.log(self.high / self.low)

    def value(self, fraction: float) -> float:
        """The value at a fraction."""
        return float(self.low * (self.high / self.low) ** fraction)

    def steps(self, number: int) -> list[float]:
        """So many values from low to high."""
        return [self.value(i / (number - 1)) for i in range(number)]

    def ticks(self) -> list[Tick]:
        """A tick at every power of ten."""
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        return [Tick(self.at(10.0**e), short(10.0**e)) for e in range(first, last + 1)]


def short(value: float) -> str:
    """A power of ten on an axis: 1K, 100K, 1M; below one, as a decimal."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def powers(high: int) -> list[int]:
    """1, 2, 4, ... up to `high`."""
    found = [1]
    while found[-1] * 2 <= high:
        found.append(found[-1] * 2)
    return found
