"""A report as one HTML file: it asks nobody for anything, holds no script, and prints.

Every text that comes from a run is escaped, and the page forbids scripts and requests to itself, so
that a run of somebody else's can be looked at.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from phalanx.core.html import html_table
from phalanx.core.units import show_bytes, show_seconds, show_share
from phalanx.reports.difference import ReportDifference
from phalanx.reports.kernels import by_kind
from phalanx.reports.report import RunReport
from phalanx.reports.term import ReportTerm, signed

WIDTH, HEIGHT = 640, 150  # of the loss curve, in units of its own
NAMES = 210  # of them that the names of terms take
ROW = 22
MARKED = ("restart", "resume", "spike", "straggler", "suspicion", "set aside", "stop")
MOST_DOTS = 200  # of held-out losses, and of marks
MOST_EVENTS = 200  # the last ones
MOST_KERNELS = 40
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --line: #d5dae1;
  --done: #2f6fb0; --plan: #c98a1b; --good: #2e8b57; --bad: #b8433a }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ef; --paper: #14181e; --line: #39424e;
  --done: #6aa8e6; --plan: #e0ab4a; --good: #5cbf8a; --bad: #e57368 } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
caption { text-align: left; font-weight: 600 }
td, th { border-bottom: 1px solid var(--line); padding: .2rem 1rem .2rem 0; text-align: left;
  font-variant-numeric: tabular-nums; vertical-align: top; white-space: nowrap }
td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 8rem }
svg { width: 100%; height: auto } text { fill: var(--ink); font-size: 11px }
.done { fill: var(--done) } .plan { fill: var(--plan) } .ideal { fill: var(--good) }
.curve { fill: none; stroke: var(--done); stroke-width: 1.5 }
.held { fill: var(--plan) } .mark { stroke: var(--bad); stroke-dasharray: 3 3 }
.axis { stroke: var(--line) } ul { padding-left: 1.2rem }
"""


def report_page(report: RunReport) -> str:
    """The page of one run.

    Args:
        report: of it.
    """
    return _page(report.name, _body(report))


def difference_page(found: ReportDifference) -> str:
    """The page of two runs: what changed, then each of them.

    Args:
        found: both.
    """
    first, second = found.first, found.second
    rows: list[tuple[str, ...]] = [
        (
            change.name,
            show_seconds(change.first),
            show_seconds(change.second),
            signed(change.change),
            "" if change.planned is None else signed(change.planned),
        )
        for change in found.terms
    ]
    if found.seconds is not None:
        whole = first.step_seconds or 0.0, second.step_seconds or 0.0
        planned = "" if found.planned is None else signed(found.planned)
        rows.append(("step", *map(show_seconds, whole), signed(found.seconds), planned))
    headers = ("term of a step", first.name, second.name, "change", "planned change")
    keys = [(key, *("" if v is None else v for v in values)) for key, *values in found.keys]
    parts = [
        "<h2>What changed</h2>",
        html_table("", rows, headers),
        html_table("keys that differ", keys, ("key", first.name, second.name)),
    ]
    for report in (first, second):
        parts += [f"<h1>{escape(report.name)}</h1>", *_body(report)]
    return _page(f"{first.name} and {second.name}", parts)


def _page(title: str, parts: Iterable[str]) -> str:
    name = escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{name}</h1>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _body(report: RunReport) -> list[str]:
    parts = [html_table("", _facts(report))]
    if report.step_seconds:
        parts += [
            "<h2>A step, from the peak to what was achieved</h2>",
            _bars(report.terms, report.step_seconds),
            _terms(report),
        ]
    if len(report.losses) > 1:
        parts += ["<h2>Loss</h2>", _curve(report)]
    if report.wall:
        wall = report.wall
        parts += ["<h2>The wall clock</h2>", _bars(wall.terms, wall.seconds or 1.0)]
    if report.traffic:
        rows = [
            (m.axis, m.collective, m.purpose, _or_nothing(m.sent), _or_nothing(m.planned))
            for m in report.traffic
        ]
        headers = ("axis", "collective", "of", "sent", "planned")
        parts += ["<h2>Bytes of rank 0 in a step</h2>", html_table("", rows, headers)]
    if report.record.kernels:
        parts += ["<h2>Kernels of rank 0 in a profiled step</h2>", *_kernels(report)]
    if report.ranks:
        parts += ["<h2>Ranks</h2>", _ranks(report)]
    if report.events:
        parts += ["<h2>What happened</h2>", _events(report)]
    if report.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        parts += ["<h2>Notes</h2>", f"<ul>{notes}</ul>"]
    return parts


def _kernels(report: RunReport) -> Iterator[str]:
    kernels = report.record.kernels
    whole = math.fsum(kernel.seconds for kernel in kernels) or 1.0
    kinds = [
        (kind, show_seconds(seconds), show_share(seconds / whole))
        for kind, seconds in by_kind(kernels).items()
    ]
    yield html_table("by what they are for", kinds, ("kernels", "seconds", "share"))
    longest = [
        (k.name, k.kind, f"{k.times:g}", show_seconds(k.seconds), show_share(k.share))
        for k in kernels[:MOST_KERNELS]
    ]
    yield html_table("the longest", longest, ("kernel", "for", "times", "seconds", "share"))


def _facts(report: RunReport) -> list[tuple[str, str]]:
    step, plan, wall = report.step, report.plan, report.wall
    planned = plan.estimate if plan else None
    found = [
        ("state", report.state),
        ("layout", str(report.layout or "")),
        ("device", str(report.record.environment.get("device", ""))),
        ("step", show_seconds(step.seconds) if step else ""),
        ("planned step", show_seconds(planned.step_seconds) if planned else ""),
        ("MFU", show_share(step.mfu) if step and step.mfu is not None else ""),
        ("planned MFU", show_share(planned.mfu) if planned else ""),
        ("peak bytes", show_bytes(report.peak_bytes, binary=True) if report.peak_bytes else ""),
        ("planned peak bytes", show_bytes(plan.peak_bytes, binary=True) if plan else ""),
        ("goodput", show_share(wall.goodput) if wall and wall.goodput is not None else ""),
        ("restarts", str(wall.restarts) if wall else ""),
    ]
    return [(name, text) for name, text in found if text]


def _bars(terms: Sequence[ReportTerm], whole: float) -> str:
    """A waterfall: each bar begins where the one before ended; the planned one lies below it."""
    room, begun, lines = WIDTH - NAMES - 90, 0.0, []
    for row, term in enumerate(terms):
        seconds, y = term.measured or 0.0, row * ROW
        x = NAMES + room * begun / whole
        style = "ideal" if row == 0 else "done"
        lines.append(f'<text x="0" y="{y + 14}">{escape(term.name)}</text>')
        lines.append(_bar(style, x, y + 4, room * seconds / whole, 9))
        if term.planned:
            lines.append(_bar("plan", x, y + 14, room * term.planned / whole, 3))
        label = escape(show_seconds(seconds))
        lines.append(f'<text x="{WIDTH}" y="{y + 14}" text-anchor="end">{label}</text>')
        begun += seconds
    title = "<title>measured; below it, thin, planned</title>"
    return f'<svg viewBox="0 0 {WIDTH} {len(terms) * ROW}" role="img">{title}{"".join(lines)}</svg>'


def _bar(style: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
        f'height="{height}"/>'
    )


def _terms(report: RunReport) -> str:
    rows = [
        (
            term.name,
            show_seconds(term.measured or 0.0),
            "" if term.planned is None else show_seconds(term.planned),
            show_share(term.share or 0.0),
            "; ".join([term.why, *(f"{n} {show_seconds(s)}" for n, s in term.parts.items())]),
        )
        for term in report.terms
    ]
    planned = report.plan.estimate.step_seconds if report.plan else None
    whole = show_seconds(report.step_seconds or 0.0)
    rows.append(("step", whole, "" if planned is None else show_seconds(planned), "100.0 %", ""))
    return html_table("", rows, ("term", "measured", "planned", "share", "what is in it"))


def _curve(report: RunReport) -> str:
    """Loss by step, with held-out loss as dots and a line where something happened."""
    points = report.losses
    held = [
        (step.step, step.validation_loss)
        for step in report.record.steps
        if step.validation_loss is not None
    ]
    held = held[:: -(-len(held) // MOST_DOTS) or 1]
    told = [e for e in report.events if e.kind in MARKED and e.step is not None][-MOST_DOTS:]
    losses = [loss for _, loss in (*points, *held)]
    low, high = min(losses), max(losses)
    first, last = points[0][0], points[-1][0]

    def at(step: float, loss: float) -> tuple[float, float]:
        across = (step - first) / max(last - first, 1)
        up = (loss - low) / (high - low or 1.0)
        return 40 + (WIDTH - 50) * across, HEIGHT - 20 - (HEIGHT - 30) * up

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    dots = [
        f'<circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        for x, y in (at(*point) for point in held)
    ]
    marks = [
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="5" y2="{HEIGHT - 20}">'
        f"<title>{escape(f'{event.kind}: {event.text}')}</title></line>"
        for event in told
        for x, _ in [at(min(max(event.step or 0, first), last), low)]
    ]
    labels = (
        f'<text x="0" y="14">{high:.3f}</text><text x="0" y="{HEIGHT - 20}">{low:.3f}</text>'
        f'<text x="40" y="{HEIGHT - 4}">step {first:,}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{last:,}</text>'
    )
    curve = f'<polyline class="curve" points="{line}"/>'
    inside = f"{labels}{''.join(marks)}{curve}{''.join(dots)}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{inside}</svg>'


def _ranks(report: RunReport) -> str:
    rows = [
        (
            rank.rank,
            rank.coordinates,
            show_seconds(rank.compute),
            show_seconds(rank.waiting),
            f"{rank.over_peers:.2f}",
        )
        for rank in report.ranks
    ]
    return html_table("", rows, ("rank", "where", "computes", "waits", "over its peers"))


def _events(report: RunReport) -> str:
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.time)),
            event.kind,
            "" if event.step is None else event.step,
            "" if event.rank is None else event.rank,
            event.text,
        )
        for event in report.events[-MOST_EVENTS:]
    ]
    left_out = len(report.events) - len(rows)
    title = f"{left_out:,} earlier ones are left out" if left_out else ""
    return html_table(title, rows, ("UTC", "event", "step", "rank", ""))


def _or_nothing(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
