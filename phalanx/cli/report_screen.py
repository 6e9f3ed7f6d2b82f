"""What `phalanx report` prints."""

import math
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

from phalanx.cli.summary import sparkline
from phalanx.cli.table import print_facts, print_table
from phalanx.core.units import show_bytes, show_rate, show_seconds, show_share
from phalanx.reports.difference import ReportDifference
from phalanx.reports.kernels import by_kind
from phalanx.reports.ranks import slowest
from phalanx.reports.report import RunReport
from phalanx.reports.term import ReportTerm, signed

WIDTH = 80  # columns of what is printed in sentences
BAR = 24  # cells of a whole step, where there is room
BESIDE = 78  # columns of a waterfall without its bars
LEAST_BAR = 8
CURVE = 48
SHOWN_EVENTS = 12
SHOWN_RANKS = 8
SHOWN_KERNELS, SHOWN_NAME = 12, 40


def print_report(report: RunReport, form: str) -> None:
    """Print a run.

    Args:
        report: of it.
        form: table, markdown or csv; csv has the terms of a step alone.
    """
    if form == "csv":
        _print_terms(report, form)
        return
    _title(report.name, form)
    print_facts(shown_rows(facts(report)), form)
    if report.terms:
        _section("a step, from the peak to what was achieved", form)
        _print_terms(report, form)
    if report.wall:
        _section("the wall clock", form)
        whole = report.wall.seconds
        rows = _wall_rows(report.wall.terms, whole)
        rows.append(("wall clock", "", show_seconds(whole), show_share(1.0)))
        _table(("", "", "seconds", "share"), rows, form)
    _print_traffic(report, form)
    _print_kernels(report, form)
    _print_ranks(report, form)
    _print_events(report, form)
    _print_notes(report.notes, form)


def _print_kernels(report: RunReport, form: str) -> None:
    """Kernels of the profiled steps: what they are for, then the longest ones."""
    kernels = report.record.kernels
    if not kernels:
        return
    whole = math.fsum(kernel.seconds for kernel in kernels) or 1.0
    _section("kernels of rank 0 in a profiled step, by what they are for", form)
    kinds = by_kind(kernels).items()
    rows = [(kind, show_seconds(seconds), show_share(seconds / whole)) for kind, seconds in kinds]
    _table(("kernels", "seconds", "share"), rows, form)
    _section("the longest kernels", form)
    longest = [
        (
            kernel.name[:SHOWN_NAME],
            kernel.kind,
            f"{kernel.times:g}",
            show_seconds(kernel.seconds),
            show_share(kernel.share),
        )
        for kernel in kernels[:SHOWN_KERNELS]
    ]
    _table(("kernel", "for", "times", "seconds", "share"), longest, form)


def print_difference(found: ReportDifference, form: str) -> None:
    """Print what changed between two runs.

    Args:
        found: both.
        form: table, markdown or csv; csv has the terms alone.
    """
    first, second = found.first, found.second
    rows = [
        (
            change.name,
            show_seconds(change.first),
            show_seconds(change.second),
            signed(change.change),
            "-" if change.planned is None else signed(change.planned),
        )
        for change in found.terms
    ]
    if found.seconds is not None:
        rows.append(
            (
                "step",
                show_seconds(first.step_seconds or 0.0),
                show_seconds(second.step_seconds or 0.0),
                signed(found.seconds),
                "-" if found.planned is None else signed(found.planned),
            )
        )
    headers = ("term of a step", first.name, second.name, "change", "planned change")
    if form != "csv":
        _title(f"{first.name} and {second.name}", form)
    _table(headers, rows, form)
    if form == "csv":
        return
    keys = [(key, _value(a), _value(b)) for key, a, b in found.keys]
    _section("keys that differ" if keys else "no key of their run files differs", form)
    if keys:
        _table(("key", first.name, second.name), keys, form)
    for report in (first, second):
        _print_notes((f"{report.name}: {note}" for note in report.notes), form)


def facts(report: RunReport) -> list[tuple[str, str]]:
    """What a run came to, as names and texts.

    Args:
        report: of it.
    """
    record, plan, rate = report.record, report.plan, report.tokens_per_second
    steps = f"{record.steps[-1].step:,}" if record.steps else "0"
    asked = f" of {record.run.recipe.last_step:,}" if record.run else ""
    wall, losses = report.wall, [loss for _, loss in report.losses]
    goodput = wall.goodput if wall else None
    return [
        ("layout", str(report.layout or "")),
        ("device", str(record.environment.get("device", ""))),
        ("steps", f"{steps}{asked}, {report.state}"),
        ("step", _step(report)),
        ("MFU", _utilization(report)),
        (
            "tokens",
            "" if rate is None else show_rate(rate, " tokens").replace("  ", " "),
        ),
        ("peak bytes", _peak_bytes(report)),
        ("loss", f"{losses[0]:.3f} to {losses[-1]:.3f} nats per token" if losses else ""),
        ("", sparkline(losses, CURVE) if len(losses) > 1 else ""),
        ("goodput", "" if goodput is None else _goodput(report)),
        ("planned on", plan.cluster.name if plan else ""),
    ]


def _step(report: RunReport) -> str:
    step, plan = report.step, report.plan
    if step is None:
        return ""
    text = f"{show_seconds(step.seconds)}, mean of steps {step.first:,} to {step.last:,}"
    if plan:
        low, high = plan.estimate.between()
        text += f"; planned {show_seconds(plan.estimate.step_seconds)} "
        text += f"({show_seconds(low)} to {show_seconds(high)})"
    return text


def _utilization(report: RunReport) -> str:
    step, plan = report.step, report.plan
    if step is None or step.mfu is None:
        return ""
    text = f"{show_share(step.mfu)}, HFU {show_share(step.hfu or step.mfu)}"
    return text + (f"; planned {show_share(plan.estimate.mfu)}" if plan else "")


def _peak_bytes(report: RunReport) -> str:
    if report.peak_bytes is None:
        return ""
    text = f"{show_bytes(report.peak_bytes, binary=True)} on the worst rank"
    plan = report.plan
    return text + (f"; planned {show_bytes(plan.peak_bytes, binary=True)}" if plan else "")


def _goodput(report: RunReport) -> str:
    wall = report.wall
    if wall is None or wall.goodput is None:
        return ""
    stopped = f", stopped {show_seconds(wall.stopped)} besides" if wall.stopped else ""
    return (
        f"{show_share(wall.goodput)} of {show_seconds(wall.seconds)}, {wall.restarts} restart"
        f"{'' if wall.restarts == 1 else 's'}"
        f"{stopped}"
    )


def _print_terms(report: RunReport, form: str) -> None:
    rows: list[tuple[str, ...]] = []
    cells = bar_cells() if form == "table" else 0
    begun, whole = 0.0, report.step_seconds or 0.0
    for term in report.terms:
        rows.append(_term_row(term, _bar(begun, term, whole, cells)))
        begun += term.measured or 0.0
        for name, seconds in term.parts.items():
            rows.append((f"  of it: {name}", "", "-", show_seconds(seconds), "-", "-"))
    plan = report.plan.estimate.step_seconds if report.plan else None
    change = "-" if plan is None else signed(whole - plan)
    planned = "-" if plan is None else show_seconds(plan)
    rows.append(("step", "█" * cells, show_seconds(whole), planned, change, show_share(1.0)))
    headers: tuple[str, ...] = ("", "", "measured", "planned", "difference", "share")
    if not cells:
        headers, rows = headers[:1] + headers[2:], [row[:1] + row[2:] for row in rows]
    _table(headers, rows, form)


def _table(headers: Sequence[str], rows: Iterable[tuple[str, ...]], form: str) -> None:
    """Print rows of which some texts are a run's own."""
    print_table([printable(header) for header in headers], shown_rows(rows), form)


def bar_cells() -> int:
    """How long a bar can be on this terminal; 0 where there is no room for any."""
    if not sys.stdout.isatty():
        return BAR
    room = shutil.get_terminal_size().columns - BESIDE
    return min(room, BAR) if room >= LEAST_BAR else 0


def _bar(begun: float, term: ReportTerm, whole: float, cells: int) -> str:
    """Begins where the term before ended."""
    if not cells or not whole:
        return ""
    until = begun + (term.measured or 0.0)
    start, end = (round(cells * each / whole) for each in (begun, until))
    return " " * start + ("█" * (end - start) or "▏")


def _term_row(term: ReportTerm, bar: str) -> tuple[str, ...]:
    seconds = term.measured or 0.0
    return (
        term.name,
        bar,
        show_seconds(seconds),
        "-" if term.planned is None else show_seconds(term.planned),
        "-" if term.planned is None else signed(seconds - term.planned),
        "-" if term.share is None else show_share(term.share),
    )


def _wall_rows(terms: Iterable[ReportTerm], whole: float) -> list[tuple[str, ...]]:
    return [
        (
            term.name,
            "█" * round(BAR * (term.measured or 0.0) / (whole or 1.0)) or "▏",
            show_seconds(term.measured or 0.0),
            show_share(term.share or 0.0),
        )
        for term in terms
    ]


def _print_traffic(report: RunReport, form: str) -> None:
    if not any(message.sent is not None for message in report.traffic):
        return
    rows = [
        (
            message.axis,
            message.collective.replace("_", "-"),
            message.purpose,
            "-" if message.sent is None else f"{message.sent:,}",
            "-" if message.planned is None else f"{message.planned:,}",
            {True: "equal", False: "differs", None: "-"}[message.equal],
        )
        for message in report.traffic
    ]
    _section("bytes that rank 0 sent in one step", form)
    _table(("axis", "collective", "of", "sent", "planned", ""), rows, form)


def _print_ranks(report: RunReport, form: str) -> None:
    slow = slowest(report.ranks)
    if slow is None:
        return
    ranked = sorted(report.ranks, key=lambda rank: -rank.compute)[:SHOWN_RANKS]
    rows = [
        (
            str(rank.rank),
            rank.coordinates,
            show_seconds(rank.compute),
            show_seconds(rank.waiting),
            f"{rank.over_peers:.2f}",
        )
        for rank in sorted({*ranked, slow})
    ]
    _section(f"ranks that compute longest; furthest above its peers: rank {slow.rank}", form)
    _table(("rank", "where", "computes", "waits", "over its peers"), rows, form)


def _print_events(report: RunReport, form: str) -> None:
    told = [event for event in report.events if event.kind != "note"][-SHOWN_EVENTS:]
    if not told:
        return
    _section("what happened", form)
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.time)),
            event.kind,
            "-" if event.step is None else f"{event.step:,}",
            printable(event.text),
        )
        for event in told
    ]
    _table(("UTC", "event", "step", ""), rows, form)


def _print_notes(notes: Iterable[str], form: str) -> None:
    lines = [printable(note) for note in notes]
    if lines:
        print()
    for line in lines:
        wrapped = textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        print(wrapped if form == "table" else f"* {line}")


def _title(name: str, form: str) -> None:
    print(f"# {printable(name)}" if form == "markdown" else printable(name))
    if form == "markdown":
        print()


def _section(text: str, form: str) -> None:
    print(f"\n## {text}\n" if form == "markdown" else f"\n{text}")


def printable(text: str) -> str:
    """A text of somebody else's without what a terminal or a table would obey."""
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "/")


def _value(value: object) -> str:
    return "-" if value is None else printable(str(value))


Row = TypeVar("Row", bound=tuple[str, ...])


def shown_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows of texts of somebody else's, each printable."""
    return [cast(Row, tuple(printable(cell) for cell in row)) for row in rows]
