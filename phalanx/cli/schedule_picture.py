"""Pictures of a schedule that has been played: in plain text, in colour, and as SVG."""

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from rich.style import Style
from rich.text import Text

from phalanx.core.schedule import Action, Kind, Schedule
from phalanx.core.timeline import Span, Timeline
from phalanx.schedules.text import parse_action

MEANINGS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
}
SHADES = {  # of the first chunk of a rank and the one after; further chunks alternate
    Kind.FORWARD: ("#8ab8f0", "#5b94dd"),
    Kind.BACKWARD: ("#9fd8a0", "#5fb56e"),
    Kind.INPUT_GRAD: ("#8fdcd6", "#4fb5ae"),
    Kind.WEIGHT_GRAD: ("#f2cf7e", "#dba944"),
}
IDLE = "."
MARGIN = len("rank 127 ")
LEFT, TOP, ROW, UNIT = 64, 30, 24, 26  # pixels of an SVG; UNIT is the shortest action


class Cell(NamedTuple):
    """One action in a line of text, and the columns that it covers."""

    action: Action
    first: int
    last: int


def plain(schedule: Schedule, timeline: Timeline, columns: int) -> list[str]:
    """Draw one line per rank in letters, `F0 F1 ...B0--- `, at most `columns` wide.

    Where a rank holds several stages, the stage comes first, as in `2F0`.

    Args:
        schedule: whose rows are drawn.
        timeline: when they happen.
        columns: of the screen.
    """
    label = "{0.kind.value}{0.microbatch}" if schedule.v == 1 else "{0}"
    lines = _lines(schedule, timeline, max(columns - MARGIN, 1), label + " ")
    return [_plain_line(rank, blocks, label) for rank, blocks in enumerate(lines)]


def coloured(schedule: Schedule, timeline: Timeline, columns: int) -> list[Text]:
    """Draw one line per rank in blocks with micro-batch numbers, at most `columns` wide.

    Args:
        schedule: whose rows are drawn.
        timeline: when they happen.
        columns: of the screen.
    """
    lines = _lines(schedule, timeline, max(columns - MARGIN, 1), "{0.microbatch} ")
    return [_coloured_line(rank, blocks, schedule) for rank, blocks in enumerate(lines)]


def plain_legend(schedule: Schedule) -> str:
    """Name the letters that occur."""
    letters = [f"{kind.value} {MEANINGS[kind]}" for kind in _kinds(schedule)]
    return "   ".join([*letters, f"{IDLE} idle"])


def coloured_legend(schedule: Schedule) -> Text:
    """Name the colours that occur."""
    parts = [(f" {MEANINGS[k]} ", _style(SHADES[k][0])) for k in _kinds(schedule)]
    return Text.assemble(*parts)


def svg(schedule: Schedule, timeline: Timeline) -> str:
    """Draw a stand-alone SVG document; a block tells its times when pointed at.

    Args:
        schedule: whose rows are drawn.
        timeline: when they happen.
    """
    scale = UNIT / _shortest(timeline)
    right = LEFT + round(max(span.end for span in timeline.spans) * scale)
    bottom = TOP + schedule.p * ROW
    title = escape(f"{schedule.name}: p={schedule.p} m={schedule.m} v={schedule.v}")
    size = f'width="{right + 8}" height="{bottom + 8}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<title>{title}</title><rect {size} fill="white"/>',
        f'<text x="8" y="19" font-size="13">{title}</text>',
        *(_svg_rank(rank, right - LEFT) for rank in range(schedule.p)),
        *(_svg_block(span, scale, schedule) for span in timeline.spans if span.seconds > 0),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _svg_rank(rank: int, width: int) -> str:
    y = TOP + rank * ROW
    return (
        f'<text x="8" y="{y + 14}">rank {rank}</text>'
        f'<rect x="{LEFT}" y="{y}" width="{width}" height="{ROW - 4}" fill="#eeeeee"/>'
    )


def _svg_block(span: Span, scale: float, schedule: Schedule) -> str:
    action = parse_action(span.label)
    x, y, width = LEFT + span.start * scale, TOP + span.rank * ROW, span.seconds * scale
    return (
        f"<g><title>{span.label}: {span.start:g} to {span.end:g}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}" '
        f'fill="{_shade(action, schedule)}" stroke="white"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle">'
        f"{action.microbatch}</text></g>"
    )


def _lines(schedule: Schedule, timeline: Timeline, columns: int, label: str) -> list[list[Cell]]:
    """Put every action into its rank's line, to one scale: the labels fit if the lines do.

    The shortest action gets whole columns, if it gets any, so that equal times look equal.
    """
    widest = max(len(label.format(action)) for row in schedule.rows for action in row)
    end = max(span.end for span in timeline.spans)
    shortest = _shortest(timeline)
    unit = min(widest, columns * shortest / end)
    scale = (int(unit) if unit >= 1 else unit) / shortest
    lines: list[list[Cell]] = [[] for _ in range(schedule.p)]
    for span in timeline.spans:
        block = Cell(parse_action(span.label), round(span.start * scale), round(span.end * scale))
        lines[span.rank].append(block)
    return lines


def _plain_line(rank: int, blocks: list[Cell], label: str) -> str:
    line = f"rank {rank}".ljust(MARGIN)
    for action, first, last in blocks:
        width = last - first
        line = line.ljust(MARGIN + first, IDLE)
        line += (label.format(action).ljust(width - 1, "-") + " ")[:width]
    return line.rstrip()


def _coloured_line(rank: int, blocks: list[Cell], schedule: Schedule) -> Text:
    line = Text(f"rank {rank}".ljust(MARGIN))
    for action, first, last in blocks:
        line.append(" " * (MARGIN + first - len(line)))
        label = str(action.microbatch)
        shown = label.ljust(last - first) if last - first >= len(label) else " " * (last - first)
        line.append(shown, _style(_shade(action, schedule)))
    return line


def _shortest(timeline: Timeline) -> float:
    return min(span.seconds for span in timeline.spans if span.seconds > 0)


def _shade(action: Action, schedule: Schedule) -> str:
    chunk = schedule.stages_of(schedule.ranks[action.stage]).index(action.stage)
    return SHADES[action.kind][chunk % 2]


def _style(background: str) -> Style:
    return Style(color="#000000", bgcolor=background)


def _kinds(schedule: Schedule) -> Iterator[Kind]:
    found = {action.kind for row in schedule.rows for action in row}
    return (kind for kind in MEANINGS if kind in found)
