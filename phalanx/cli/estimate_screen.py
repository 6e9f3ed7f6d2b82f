"""Shows one priced layout on a screen: seconds as a waterfall, bytes as bars, messages."""

import math
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from phalanx.cli.plan_screen import CLASSES, in_colour, legend, open_console, training
from phalanx.core.estimate import Estimate, RankBytes, Term
from phalanx.core.units import show_bytes, show_count, show_seconds, show_share
from phalanx.planner.goodput import Campaign
from phalanx.planner.sweep import Request

MOST_CELLS, LEAST_CELLS = 44, 12  # of a bar
BESIDE_FALL = 66  # columns of text in a row of the waterfall
BESIDE_BAR = 62  # columns of text beside a bar of memory
WIDE = 96  # columns that the table of messages needs to be complete
SHOWN_RANKS = 6
SMALL = 0.0005  # share of a step that is not worth a row


def show(request: Request, found: Estimate, whole: Campaign | None = None) -> None:
    """Print all of an estimate.

    Args:
        request: what was asked.
        found: the estimate.
        whole: a training with it, if one was asked for.
    """
    console = open_console()
    colour, width = in_colour(console), console.width
    for line in heading(request, found):
        console.print(line)
    console.print("\nseconds, from what the peak allows to what is expected")
    console.print(waterfall(found, _cells(width - BESIDE_FALL), colour=colour))
    console.print("worth: what the step would be shorter by without it")
    console.print(f"\nbytes of a device of {show_bytes(found.capacity)}")
    console.print(memory(found, _cells(width - BESIDE_BAR), colour=colour))
    console.print(legend(colour=colour))
    if found.messages:
        console.print("\nmessages of the rank that sets the pace, in one step")
        console.print(messages(found, complete=width >= WIDE))
    if whole is not None:
        console.print()
        for line in training(found, whole, "this layout"):
            console.print(line)
    for note in found.notes:
        console.print(f"note: {note}")


def _cells(room: int) -> int:
    return max(LEAST_CELLS, min(MOST_CELLS, room))


def heading(request: Request, found: Estimate) -> Iterator[str]:
    """What was asked, and the answer in two lines.

    Args:
        request: what was asked.
        found: the estimate.
    """
    shape, device = request.shape, request.cluster.accelerator.name
    yield (
        f"{shape.name} ({show_count(shape.params())} parameters) on "
        f"{request.cluster.count:,} {device}, as {request.framework.name} does it"
    )
    yield (
        f"{found.layout}  |  {request.batch:,} sequences of {request.seq:,} tokens, "
        f"{found.micro_batches} micro-batches"
    )
    low, high = found.between()
    yield (
        f"{show_seconds(found.step_seconds)} a step (80 %: {show_seconds(low)} to "
        f"{show_seconds(high)}), {show_count(found.tokens_per_second)} tokens/s, "
        f"MFU {show_share(found.mfu)}, HFU {show_share(found.hfu)}"
    )
    yield f"the interval rests on {found.spread_reason}"
    over = found.bubble / (1 - found.bubble) if found.bubble < 1 else 0.0
    yield (
        f"bubble {show_share(over)} of the work, {show_share(found.bubble)} of the pipeline; "
        f"{found.convention}"
    )


def walk(term: Term, depth: int = 0) -> Iterator[tuple[int, Term]]:
    """A term and all below it, with their depth.

    Args:
        term: where to begin.
        depth: of it.
    """
    yield depth, term
    for child in term.children:
        yield from walk(child, depth + 1)


def rows(step: Term) -> list[tuple[str, str, str, str]]:
    """The tree as rows, children below their parents."""
    return [
        (
            "  " * depth + term.name,
            show_seconds(term.seconds),
            show_share(term.seconds / step.seconds),
            "" if math.isnan(term.worth) else show_seconds(term.worth),
        )
        for depth, term in walk(step)
    ]


def leaves(step: Term) -> list[tuple[str, Term]]:
    """The leaves with their names, those at the peak first: what could not be saved."""
    named = [
        (leaf.name if leaf is term else f"{term.name}: {leaf.name}", leaf)
        for term in step.children
        for leaf in term.leaves()
    ]
    return sorted(named, key=lambda pair: not pair[0].endswith("at the peak"))


def waterfall(found: Estimate, cells: int, *, colour: bool) -> Table:
    """One row for each part, beginning where the one before ended; the last is the whole step.

    Args:
        found: the estimate.
        cells: of the longest bar.
        colour: whether there is any.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("", "left"), ("", "left"), ("seconds", "right"), ("share", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # literals
    table.add_column("worth", justify="right", no_wrap=True)
    whole, begun = found.step_seconds, 0.0
    for name, leaf in leaves(found.step):
        if leaf.seconds >= SMALL * whole:
            ideal = name.endswith("at the peak")
            style = ("green" if ideal else "yellow") if colour else ""
            table.add_row(
                name,
                _bar(cells * begun / whole, cells * (begun + leaf.seconds) / whole, style),
                show_seconds(leaf.seconds),
                show_share(leaf.seconds / whole),
                "" if math.isnan(leaf.worth) else show_seconds(leaf.worth),
            )
        begun += leaf.seconds
    bold = "bold" if colour else ""
    table.add_row("step", _bar(0, cells, bold), show_seconds(whole), show_share(1.0), "")
    return table


def _bar(first: float, last: float, style: str) -> Text:
    start, stop = round(first), round(last)
    text = Text(" " * start)
    text.append("█" * (stop - start) or "▏", style=style)
    return text


def shown_ranks(found: Estimate) -> list[RankBytes]:
    """The ranks worth a bar: all, or the first ones, the worst and the last."""
    if len(found.ranks) <= SHOWN_RANKS:
        return list(found.ranks)
    chosen = {0, 1, found.worst_rank.stage, len(found.ranks) // 2, len(found.ranks) - 1}
    return [rank for rank in found.ranks if rank.stage in chosen]


def memory(found: Estimate, cells: int, *, colour: bool) -> Table:
    """A stacked bar for each pipeline rank, against the capacity at its right end.

    Args:
        found: the estimate.
        cells: of the longest bar.
        colour: whether there is any.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(no_wrap=True)
    scale = cells / max(found.capacity, found.peak_bytes)
    for rank in shown_ranks(found):
        worst = rank.stage == found.worst_rank.stage and len(found.ranks) > 1
        table.add_row(
            f"rank {rank.stage}",
            stacked(rank, found.capacity, scale, colour=colour),
            show_bytes(rank.total),
            f"at its {rank.moment}, {rank.in_flight:g} in flight"
            + (", the worst" if worst else ""),
        )
    return table


def stacked(rank: RankBytes, capacity: float, scale: float, *, colour: bool) -> Text:
    """Class after class, and a mark where the device ends.

    Args:
        rank: whose bytes are drawn.
        capacity: bytes of the device.
        scale: cells to a byte.
        colour: whether there is any.
    """
    bar, total, drawn = Text(), 0.0, 0
    for name, size in rank.by_class:
        letter, style = CLASSES[name]
        total += size
        until = max(round(scale * total), drawn)
        bar.append(("█" if colour else letter) * (until - drawn), style if colour else "")
        drawn = until
    end = round(scale * capacity)
    if drawn <= end:
        bar.append("." * (end - drawn) + "|", "bright_black" if colour else "")
        return bar
    return Text.assemble(bar[:end], ("|", "bold red" if colour else ""), bar[end:])


def messages(found: Estimate, *, complete: bool) -> Table:
    """One row for each kind of message; on a narrow screen without the name of the operation.

    Args:
        found: the estimate.
        complete: whether there is room for all columns.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("axis", "collective", "of") if complete else ("axis", "of"):
        table.add_column(name, no_wrap=True)
    for name in ("ranks", "bytes", "times", "seconds", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    for message in found.messages:
        table.add_row(
            message.axis,
            *([message.collective.replace("_", "-")] if complete else []),
            message.purpose,
            str(message.ranks),
            show_bytes(message.bytes),
            f"{message.times:,.0f}",
            show_seconds(message.seconds),
            show_seconds(message.exposed),
        )
    return table
