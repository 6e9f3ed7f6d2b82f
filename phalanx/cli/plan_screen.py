"""Shows a plan on a screen: the ranking with bars of memory, and where the step's time goes."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.api.plans import Plan
from phalanx.core.estimate import Estimate, Term
from phalanx.core.layout import Layout
from phalanx.core.units import show_bytes, show_count, show_seconds, show_share
from phalanx.planner.diagnosis import Diagnosis
from phalanx.planner.explain import differences, show_signed, why_slower
from phalanx.planner.goodput import DAY, Campaign
from phalanx.planner.rerank import Ranked
from phalanx.planner.search import Found

# Classes of memory in the order of the bar: letter where there are no colours, and colour.
CLASSES = {
    "weights": ("w", "blue"),
    "gradients": ("g", "cyan"),
    "optimizer": ("o", "magenta"),
    "activations": ("a", "yellow"),
    "logits": ("l", "red"),
    "buffers": ("b", "green"),
    "reserve": ("r", "bright_black"),
}
BAR = 16  # cells of a bar of memory
SHORT_BAR = 10  # of them where there is less room
WATERFALL = 36  # cells of the longest bar of time
SHOWN_TERMS = 9
SMALL = 0.001  # share of a step that is not worth a row
PLAIN_WIDTH = 140
NARROW = 120  # columns below which the reasons stand under the layouts, not beside them
BESIDE_FALL = 55  # columns that the names and numbers beside the bars of time take

HEADERS = (
    "rank",
    "layout",
    "step_seconds",
    "mfu",
    "hfu",
    "tokens_per_second",
    "peak_bytes",
    "bubble",
    "reasons",
)
Row = tuple[str, Estimate, Sequence[str]]  # rank, price, and why


def show(plan: Plan) -> None:
    """Print all of a plan."""
    console = open_console()
    for line in heading(plan):
        console.print(line)
    rows = [(str(r.rank), r.estimate, plan.reasons(r.estimate)) for r in plan.found.ranked]
    console.print()
    console.print(ranking(rows, console, binary=plan.binary))
    console.print(legend(colour=in_colour(console)))
    console.print(f"\nwhere the {show_seconds(plan.best.step_seconds)} of rank 1 go")
    console.print(waterfall(plan.best, console))
    console.print(Text("\n").join(Text(line) for line in ("", *plain(plan), *heuristic(plan))))
    if plan.reasoned is not None:
        console.print()
        show_why(plan, plan.reasoned, console)
    if plan.training is not None:
        console.print()
        for line in training(plan.best, plan.training, "rank 1"):
            console.print(line)


def open_console() -> Console:
    """A console on stdout, wide enough for the table where it is no terminal."""
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        return console
    return Console(width=PLAIN_WIDTH, highlight=False, markup=False, no_color=True)


def in_colour(console: Console) -> bool:
    """Whether bars can be told apart by colour."""
    return console.color_system is not None and not console.no_color


def heading(plan: Plan) -> list[str]:
    """What was asked, and how much was looked at."""
    found, request = plan.found, plan.found.request
    device = request.cluster.accelerator
    capacity = show_bytes(request.capacity, binary=plan.binary)
    refused = sum(found.refused.values())
    return [
        f"{request.shape.name} ({show_count(request.shape.params())} parameters) in "
        f"{request.precision} on {request.cluster.count:,} {device.name} of {capacity}; "
        f"{request.batch:,} sequences of {request.seq:,} tokens a step, "
        f"as {request.framework.name} does it",
        *plan.notes,
        f"{found.considered:,} layouts divide the devices and the batch; {found.feasible:,} fit, "
        f"{refused:,} are refused; {plan.seconds:.1f} s",
        *(f"  {count:>12,}  {reason}" for reason, count in _most_first(found.refused)),
        *(f"seconds rest on {ranked.estimate.spread_reason}" for ranked in found.ranked[:1]),
    ]


def _most_first(refused: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(refused.items(), key=lambda item: -item[1])


def short(layout: Layout) -> str:
    """A layout line without its precision, which the heading names."""
    return " ".join(word for word in str(layout).split() if not word.startswith("precision="))


def memory_bar(found: Estimate, *, colour: bool, cells: int = BAR) -> Text:
    """What the worst rank holds, class by class, against what the device has.

    Args:
        found: the layout.
        colour: whether there is any.
        cells: of a whole device.
    """
    bar, drawn, total = Text(), 0, 0.0
    for name, size in found.worst_rank.by_class:
        letter, style = CLASSES[name]
        total += size
        until = max(min(round(cells * total / found.capacity), cells), drawn)
        bar.append(("█" if colour else letter) * (until - drawn), style if colour else "")
        drawn = until
    return bar.append(("░" if colour else ".") * (cells - drawn), "bright_black" if colour else "")


def legend(*, colour: bool) -> Text:
    """What the pieces of a bar of memory stand for."""
    text = Text("memory: ")
    for name, (letter, style) in CLASSES.items():
        text.append("█ " if colour else f"{letter} ", style if colour else "")
        text.append(f"{name}  ")
    return text


def ranking(rows: Sequence[Row], console: Console, *, binary: bool) -> Table:
    """Layouts, one to a row, with bars of memory in GiB or GB, and why beside or below.

    Args:
        rows: rank, estimate and reasons of each layout.
        console: that it is for.
        binary: GiB, not GB.
    """
    narrow = console.width < NARROW
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("layout", min_width=28)
    for name in ("s/step", "MFU", "bubble"):
        table.add_column(name, justify="right", no_wrap=True)
    capacity = show_bytes(rows[0][1].capacity, binary=binary)
    table.add_column(f"memory of {capacity}", no_wrap=True)
    if not narrow:
        table.add_column("why", min_width=24)
    for place, (rank, found, words) in enumerate(rows):
        cells = SHORT_BAR if narrow else BAR
        memory = memory_bar(found, colour=in_colour(console), cells=cells)
        memory.append(f" {show_bytes(found.peak_bytes, binary=binary)}")
        why = "; ".join(words)
        table.add_row(
            rank,
            f"{short(found.layout)}\n{why}" if narrow else short(found.layout),
            f"{found.step_seconds:.3f}",
            show_share(found.mfu),
            show_share(found.bubble),
            memory,
            *([] if narrow else [why]),
            style="bold" if place == 0 else "",
        )
    return table


def table_row(plan: Plan, ranked: Ranked) -> Sequence[str]:
    """One layout as a row of `HEADERS`.

    Args:
        plan: whose best it is compared with.
        ranked: the layout.
    """
    found = ranked.estimate
    return (
        str(ranked.rank),
        str(found.layout),
        f"{found.step_seconds:.6g}",
        f"{found.mfu:.4f}",
        f"{found.hfu:.4f}",
        f"{found.tokens_per_second:.6g}",
        f"{found.peak_bytes:.0f}",
        f"{found.bubble:.4f}",
        "; ".join(plan.reasons(found)),
    )


def waterfall(found: Estimate, console: Console) -> Table:
    """Where the time of one step goes, longest first.

    Args:
        found: the layout.
        console: that it is for.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    parts = sorted(_parts(found.step), key=lambda part: -part[1])
    cells = max(min(WATERFALL, console.width - BESIDE_FALL), 1)
    for name, seconds in parts[:SHOWN_TERMS]:
        useful = name.endswith("at the peak")
        style = ("green" if useful else "yellow") if in_colour(console) else ""
        bar = Text("█" * round(cells * seconds / parts[0][1]), style=style)
        table.add_row(name, show_seconds(seconds), show_share(seconds / found.step_seconds), bar)
    rest = sum(seconds for _, seconds in parts[SHOWN_TERMS:])
    if rest > 0:
        table.add_row("all else", show_seconds(rest), show_share(rest / found.step_seconds), "")
    return table


def _parts(step: Term) -> Iterator[tuple[str, float]]:
    """The leaves of a step, each with the name of the term that it is part of."""
    for term in step.children:
        for leaf in term.leaves():
            yield (leaf.name if leaf is term else f"{term.name}: {leaf.name}"), leaf.seconds


def plain(plan: Plan) -> list[str]:
    """The best layout with a whole backward, and what splitting it buys."""
    if plan.found.plain is None:
        return []
    other, best = plan.found.plain.estimate, plan.best
    slower = other.step_seconds - best.step_seconds
    return [
        f"without splitting the backward: {short(other.layout)}",
        f"  {show_seconds(other.step_seconds)}, MFU {show_share(other.mfu)}, "
        f"rank {plan.found.plain.rank:,}; {show_signed(slower)} a step: "
        f"{'; '.join(why_slower(other, best))}",
    ]


def heuristic(plan: Plan) -> list[str]:
    """The layout of the textbook's procedure beside the best."""
    title = "by the textbook (tp up to the domain, pp just large enough to fit, dp the rest)"
    if isinstance(plan.heuristic, str):
        return [f"{title}: {plan.heuristic}"]
    book, best = plan.heuristic, plan.best
    slower = book.step_seconds - best.step_seconds
    return [
        f"{title}: {short(book.layout)}",
        f"  {show_seconds(book.step_seconds)}, MFU {show_share(book.mfu)}, "
        f"{_place(plan.found, book)} of {plan.found.feasible:,}; "
        f"{show_signed(slower)} a step: {'; '.join(why_slower(book, best))}",
    ]


def _place(found: Found, price: Estimate) -> str:
    """The rank of a layout, if it is among those that were priced."""
    if price.step_seconds <= found.bar:
        return f"rank {found.rank(price):,}"
    return f"behind the fastest {len(found.seconds):,}"


def show_why(plan: Plan, asked: Diagnosis, console: Console) -> None:
    """Print what there is to say about the layout that was asked for.

    Args:
        plan: that it is compared with.
        asked: what was found about it.
        console: that it is for.
    """
    console.print(f"why not {asked.asked}?")
    if asked.estimate is None or asked.refusal:
        console.print(f"  {asked.refusal}")
        if asked.fix is not None:
            fixed = asked.fix.estimate
            console.print(
                f"  it fits with {asked.fix.changes}: {show_seconds(fixed.step_seconds)}, "
                f"{show_bytes(fixed.peak_bytes, binary=plan.binary)}, "
                f"{_place(plan.found, fixed)}"
            )
        return
    found, best = asked.estimate, plan.best
    console.print(
        f"  {short(found.layout)}: {show_seconds(found.step_seconds)}, "
        f"MFU {show_share(found.mfu)}, rank {asked.rank:,} of {plan.found.feasible:,}"
    )
    console.print(side_by_side(found, best))


def side_by_side(found: Estimate, best: Estimate) -> Table:
    """Two prices term by term; terms that hardly differ are added up.

    Args:
        found: the one that was asked for.
        best: the fastest.
    """
    table = Table(box=None, pad_edge=True, header_style="bold")
    table.add_column("term")
    for name in ("this one", "rank 1", "difference"):
        table.add_column(name, justify="right")
    ours = {term.name: term.seconds for term in found.step.children}
    theirs = {term.name: term.seconds for term in best.step.children}
    small = [0.0, 0.0]
    for name, apart in differences(found, best):
        both = ours.get(name, 0.0), theirs.get(name, 0.0)
        if abs(apart) < SMALL * best.step_seconds:
            small = [sum(pair) for pair in zip(small, both, strict=True)]
        else:
            table.add_row(name, *map(show_seconds, both), show_signed(apart))
    table.add_row("terms that hardly differ", *map(show_seconds, small), "")
    both = found.step_seconds, best.step_seconds
    table.add_row("step", *map(show_seconds, both), show_signed(both[0] - both[1]), style="bold")
    return table


def training(found: Estimate, whole: Campaign, name: str) -> list[str]:
    """How long the whole training takes, and what it costs.

    Args:
        found: the price of its layout.
        whole: the training.
        name: of the layout, in a word or two.
    """
    low, high = (seconds / found.step_seconds * whole.seconds / DAY for seconds in found.between())
    days = whole.seconds / DAY
    price = f", {whole.cost:,.0f} at {whole.conditions.price:g} an hour" if whole.cost else ""
    return [
        f"{show_count(whole.tokens)} tokens with {name}: {whole.steps:,} steps, "
        f"{whole.training_seconds / DAY:,.3g} days of training in {days:,.3g} days "
        f"({show_share(whole.share)}), {show_count(whole.device_hours)} device-hours{price}",
        f"  between {low:,.3g} and {high:,.3g} days, if the step is as uncertain as on published "
        f"runs (80 %); {whole.failures:,.3g} failures on average",
        *(f"  assumed: {line}" for line in whole.assumptions()),
    ]
