"""Draws run directories: loss, rate, time, memory, events, and what was measured over what was planned."""

import re
from collections.abc import Callable, Sequence
from html import escape

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.core.units import show_bytes, show_count, show_seconds, show_share
from phalanx.explore.draw import (
    Bar,
    BarPiece,
    Curve,
    Mark,
    Tick,
    bars,
    legend,
    percent,
    plot,
    table,
)
from phalanx.explore.runs import RanSpan, RunFolder, newest, number_of, series, split
from phalanx.explore.timelines import COLOURS, FIRST, Pace, drawn
from phalanx.schedules.text import parse_action

MOST_RUNS = 8
ROW = 18
AXES = ("data", "tensor", "pipeline", "context", "expert")
KINDS = {"save": "note", "resume": "note", "restart": "bad", "spike": "bad", "suspicion": "bad", "straggler": "bad",
         "stop": "note", "set aside": "bad"}  # fmt: skip


def listing(names: Sequence[str], chosen: Sequence[int]) -> str:
    """Boxes to tick, one for each run.

    Args:
        names: of the directories.
        chosen: which are shown.
    """
    if not names:
        return (
            "<p>No run is open. <code>phalanx explore runs/NAME</code> opens one, <code>phalanx explore runs</code> all "
            "of a folder; without a name, those below <code>runs/</code> are found by themselves.</p>"
        )
    boxes = "".join(
        f'<label><input type="checkbox" data-run="{number}"{" checked" if number in chosen else ""}> '
        f'<span class="rundot">{_key(chosen.index(number)) if number in chosen else ""}</span>{escape(name)}</label>'
        for number, name in enumerate(names)
    )
    return f'<div class="runlist" role="group" aria-label="Runs">{boxes}</div>'


def _key(place: int) -> str:
    return f'<svg width="10" height="10" aria-hidden="true"><rect width="10" height="10" class="c-d{place % 8}"/></svg>'


def view(runs: Sequence[RunFolder]) -> str:
    """Everything about some runs, over each other.

    Args:
        runs: at most `MOST_RUNS` are shown.
    """
    shown = list(runs[:MOST_RUNS])
    if not shown:
        return ""
    parts = [
        _facts(shown),
        _figure("loss by step", _curves(shown, (("loss", False), ("validation_loss", True)), "nats per token"),
                _table(shown, "loss")),
        _figure("tokens per second", _curves(shown, (("tokens_per_second", False),), "tokens/s"), _table(shown, "tokens_per_second")),
        _mfu(shown),
        _figure("where the seconds of a step go", _time(shown), ""),
        _memory(shown),
        *(_timeline(run) for run in shown),
        _events(shown),
    ]  # fmt: skip
    problems = [f"{run.name}: {problem}" for run in shown for problem in run.problems]
    return "".join(parts) + "".join(f'<p class="fine">{escape(text)}</p>' for text in problems)


def _figure(label: str, picture: str, behind: str) -> str:
    text = escape(label)
    more = (
        f'<details class="behind"><summary>As a table</summary><div class="scroll">{behind}</div></details>'
        if behind
        else ""
    )
    return f'<h4>{text}</h4><figure class="picture" aria-label="{text}">{picture}{more}</figure>'


def _facts(runs: Sequence[RunFolder]) -> str:
    rows = [
        (
            run.name,
            run.layout or "unknown",
            "done" if run.done else "not done",
            f"{run.steps[-1]['step']:,}" if run.steps else "0",
            _of(newest(run, "loss"), ".4f"),
            _of(newest(run, "validation_loss"), ".4f"),
            _show(newest(run, "tokens_per_second"), show_count),
            _show(newest(run, "mfu"), show_share),
            _show(newest(run, "peak_bytes"), show_bytes),
        )
        for run in runs
    ]
    headers = ("run", "layout", "", "step", "loss", "held-out", "tokens/s", "MFU", "memory")
    return f'<div class="scroll">{table(headers, rows, "the newest step of each")}</div>'


def _of(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _show(value: float | None, shown: Callable[[float], str]) -> str:
    return "—" if value is None else shown(value)


def _curves(runs: Sequence[RunFolder], keys: Sequence[tuple[str, bool]], unit: str) -> str:
    """One curve for each run and quantity, on linear axes."""
    lines = [(run, key, dashed, series(run, key)) for run in runs for key, dashed in keys]
    points = [point for *_, found in lines for point in found]
    if not points:
        return '<p class="quiet">nothing was written yet</p>'
    last = max(step for step, _ in points)
    low, high = min(v for _, v in points), max(v for _, v in points)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - room, high + room
    curves, marks = [], []
    for place, run in enumerate(runs):
        for other, key, dashed, found in lines:
            if other is not run:
                continue
            at = [(step / last, (value - low) / (high - low)) for step, value in found]
            name = f"{run.name}: {key.replace('_', ' ')}" if found else ""
            curves.append(Curve(at, f"d{place % 8}", name, dashed))
            if key.startswith("validation") or len(at) == 1:
                marks += [Mark(x, f"d{place % 8}", "", y) for x, y in at[-40:]]
    xs = [Tick(i / 4, f"{last * i / 4:,.0f}") for i in range(5)]
    ys = [
        Tick((v - low) / (high - low), f"{v:.4g}")
        for v in (low + room, (low + high) / 2, high - room)
    ]
    return plot(curves, marks, (xs, ys), ("step", unit), 200)


def _table(runs: Sequence[RunFolder], key: str) -> str:
    """Some twenty steps of a quantity."""
    found = [dict(series(run, key)) for run in runs]
    steps = sorted({step for one in found for step in one})
    every = max(1, len(steps) // 20)
    rows = [
        (f"{step:,}", *(f"{one[step]:.5g}" if step in one else "" for one in found))
        for step in steps[::every]
    ]
    return table(("step", *(run.name for run in runs)), rows, key.replace("_", " "))


def _mfu(runs: Sequence[RunFolder]) -> str:
    if not any(series(run, "mfu") for run in runs):
        return '<p class="fine">There is no MFU: nobody published the peak of this device, or nothing was written yet.</p>'
    return _figure(
        "MFU and HFU",
        _curves(runs, (("mfu", False), ("hfu", True)), "share of the peak"),
        _table(runs, "mfu"),
    )


def _time(runs: Sequence[RunFolder]) -> str:
    """A stacked bar for each run: computing, waiting by axis, waiting for data."""
    parts = [split(run) for run in runs]
    longest = max((sum(part.values()) for part in parts), default=0.0) or 1.0
    rows = [
        Bar(run.name, [BarPiece(s / longest, _colour(n), f"{n}: {show_seconds(s)}") for n, s in sorted(part.items(), key=_order)],
            show_seconds(sum(part.values())),
            "; ".join(f"{n} {show_seconds(s)}" for n, s in sorted(part.items(), key=lambda item: -item[1])[:6]))
        for run, part in zip(runs, parts, strict=True)
    ]  # fmt: skip
    names = sorted({name for part in parts for name in part}, key=lambda name: _order((name, 0.0)))
    return bars(rows) + legend((name, _colour(name)) for name in names)


def _order(item: tuple[str, float]) -> tuple[bool, str]:
    return item[0] != "computing", item[0]


def _colour(name: str) -> str:
    if name in AXES:
        return name
    return "compute" if name == "computing" else "world" if name != "data wait" else "activations"


def _memory(runs: Sequence[RunFolder]) -> str:
    """Most bytes of any rank, and under it what was planned, where the run file names a cluster."""
    sizes = [(run.name, "weights", newest(run, "peak_bytes")) for run in runs]
    sizes += [(f"{run.name}, planned", "reserve", run.planned) for run in runs if run.planned]
    longest = max((size for *_, size in sizes if size), default=0.0)
    if not longest:
        return ""
    rows = [
        Bar(n, [BarPiece(size / longest, colour)], show_bytes(size))
        for n, colour, size in sizes
        if size
    ]
    note = (
        ""
        if any(run.planned for run in runs)
        else '<p class="fine">No run file here names a cluster, so there is no plan to hold against.</p>'
    )
    return _figure("most bytes that any rank held", bars(rows), "") + note


def _events(runs: Sequence[RunFolder]) -> str:
    found = [
        (number_of(event.get("time")) or 0.0, run.name, event)
        for run in runs
        for event in run.events
    ]
    found.sort(key=lambda item: item[0])
    if not found:
        return ""
    items = "".join(_event(name, event) for _, name, event in found[-60:])
    return f'<h4>Events</h4><ul class="events">{items}</ul>'


def _event(name: str, event: dict[str, object]) -> str:
    kind = str(event.get("kind", ""))[:20]
    step = event.get("step")
    where = f"step {step:,}" if isinstance(step, int) else ""
    rank = f", rank {event['rank']}" if isinstance(event.get("rank"), int) else ""
    return (
        f'<li><span class="v {KINDS.get(kind, "")}">{escape(kind)}</span> <span class="quiet">{escape(name)} {where}{rank}</span> '
        f"{escape(str(event.get('text', ''))[:400])}</li>"
    )


def _timeline(run: RunFolder) -> str:
    """The measured timeline, and under it the planned one of the same schedule, each to its own length."""
    if not run.spans:
        return ""
    spans = _one_step(run.spans)
    first = min(span.start for span in spans)
    whole = max(span.start + span.seconds for span in spans) - first or 1.0
    ranks = sorted({span.rank for span in spans})[:32]
    measured = _rows([s for s in spans if s.rank in ranks], ranks, first, whole)
    head = f"{run.name}: what each rank did in {show_seconds(whole)}, measured"
    planned = _planned(run.layout, spans)
    names = [
        ("forward", "f"),
        ("backward", "b"),
        ("input gradient", "i"),
        ("weight gradient", "w"),
        ("optimizer", "optimizer"),
        ("else", "reserve"),
    ]
    return _figure(head, f"{measured}{planned}{legend(names)}", "")


def _one_step(spans: Sequence[RanSpan]) -> list[RanSpan]:
    """Spans until the first rank begins its first pass again: one step of the few that were traced."""
    passes = sorted(
        (s for s in spans if re.fullmatch(r"[0-9]+F[0-9]+", s.name)), key=lambda s: s.start
    )
    again = [s.start for s in passes if (s.rank, s.name) == (passes[0].rank, passes[0].name)]
    return [s for s in spans if s.start < again[1]] if len(again) > 1 else list(spans)


def _rows(spans: Sequence[RanSpan], ranks: Sequence[int], first: float, whole: float) -> str:
    place = {rank: i for i, rank in enumerate(ranks)}
    parts = [
        f'<rect x="{percent((s.start - first) / whole)}" y="{place[s.rank] * ROW}" width="{percent(s.seconds / whole)}" '
        f'height="{ROW - 3}" class="c-{_pass_colour(s.name)}"><title>{escape(s.name)}: {show_seconds(s.seconds)}</title></rect>'
        for s in spans
    ]
    names = "".join(f"<span>{rank}</span>" for rank in ranks)
    return (
        f'<div class="timeline short"><div class="ranks" aria-hidden="true">{names}</div>'
        f'<svg width="100%" height="{len(ranks) * ROW}" aria-hidden="true">{"".join(parts)}</svg></div>'
    )


def _pass_colour(name: str) -> str:
    if re.fullmatch(r"[0-9]+[A-Z]+[0-9]+", name):
        try:
            action = parse_action(name)
        except PhalanxError:
            return "reserve"
        if action.kind in FIRST:
            return COLOURS[FIRST[action.kind] + action.stage % 2]
    return "optimizer" if "optim" in name or "update" in name else "reserve"


def _planned(line: str, spans: Sequence[RanSpan]) -> str:
    """The schedule as it was planned, with the mean durations that were measured."""
    try:
        layout = Layout.parse(line)
        passes = (re.fullmatch(r"[0-9]+F([0-9]+)", span.name) for span in spans)
        m = 1 + max(int(one[1]) for one in passes if one)
        pace = Pace(_mean(spans, "F"), _mean(spans, "I"), _mean(spans, "W"))
        if not pace.input_grad:
            whole = _mean(spans, "B")
            pace = Pace(pace.forward, whole / 2, whole / 2)
        found = drawn(layout.schedule, layout.pp, m, layout.v, pace)
    except (PhalanxError, ValueError, ZeroDivisionError):
        return ""
    ranks = list(range(layout.pp))
    cells = found.cells
    parts = "".join(
        f'<rect x="{percent(start)}" y="{rank * ROW}" width="{percent(width)}" height="{ROW - 3}" class="c-{COLOURS[colour]}"/>'
        for rank, start, width, colour, _ in zip(*(c.tolist() for c in cells), strict=True)
    )
    names = "".join(f"<span>{rank}</span>" for rank in ranks)
    return (
        f'<p class="fine">as planned: {escape(found.title)}, {m} micro-batches, {show_seconds(found.found.makespan)} at the durations measured, '
        f"bubble {found.found.bubble_over_ideal:.1%} of the work</p>"
        f'<div class="timeline short"><div class="ranks" aria-hidden="true">{names}</div>'
        f'<svg width="100%" height="{layout.pp * ROW}" aria-hidden="true">{parts}</svg></div>'
    )


def _mean(spans: Sequence[RanSpan], letter: str) -> float:
    found = [span.seconds for span in spans if re.fullmatch(rf"[0-9]+{letter}[0-9]+", span.name)]
    return sum(found) / len(found) if found else 0.0
