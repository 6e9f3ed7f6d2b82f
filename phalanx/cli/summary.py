"""The screens before and after training: what was asked for, what it came to, what to try next."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from phalanx.core.units import show_bytes, show_count, show_rate, show_seconds, show_share
from phalanx.trainer.run.report import RunInfo, Summary

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_CELLS = 48
BAR_CELLS = 24


def show_info(info: RunInfo) -> RenderableType:
    """What is about to be trained."""
    shape, layout = info.model, info.layout
    table = _table()
    table.add_row(
        "model",
        f"{show_count(info.parameters)} parameters: {shape.layers} layers, hidden {shape.hidden}, "
        f"{shape.heads} heads ({shape.kv_heads} kv), vocabulary {shape.vocab:,}",
    )
    if info.weights:
        table.add_row("from", info.weights)
    table.add_row("text", info.corpus)
    table.add_row(
        "layout",
        f"{layout}: {layout.ranks} ranks, {_join(info.stages)} layers per stage, "
        f"{info.micro_batches} micro-batches of {layout.mb}",
    )
    table.add_row("precision", info.precision)
    table.add_row("device", info.device)
    table.add_row("peak", _peak(info))
    if info.first_step:
        table.add_row("resumed", f"after step {info.first_step} of {info.steps}")
    if info.directory:
        table.add_row("written to", info.directory)
    return table


def print_summary(console: Console, summary: Summary) -> None:
    """Write what a run came to, for a person to read.

    Args:
        console: where; commands to try next are not folded to its width.
        summary: of the run; what it does not know is left out.
    """
    console.print(_panel(summary))
    if summary.sample:
        console.print(Text("\nWhat it writes now:", style="bold"))
        console.print(Text(_printable(summary.sample)))
    if summary.next_steps:
        console.print(Text("\nTry next:", style="bold"))
    for command, why in summary.next_steps:  # never folded: they are there to be copied
        line = Text.assemble((f"  {command}", "green"), (f"  # {why}", "dim"))
        console.print(line, soft_wrap=True)


def _panel(summary: Summary) -> Panel:
    facts = _table()
    if summary.tokens:
        facts.add_row("loss", _losses(summary))
    if summary.validation_loss is not None:
        facts.add_row("held out", _loss(summary.validation_loss, summary))
    if len(summary.losses) > 1:
        facts.add_row("curve", sparkline(summary.losses, CURVE_CELLS))
    if summary.tokens:
        facts.add_row("speed", _speed(summary))
    if summary.tokens and summary.convention:
        facts.add_row("", Text(summary.convention, style="dim"))
    if summary.time_split:
        facts.add_row("time", _time_split(summary.time_split))
    if summary.goodput is not None and summary.lost_seconds:
        facts.add_row("goodput", _goodput(summary))
    for line in summary.stragglers:
        facts.add_row("slow", line)
    if summary.peak_bytes:
        facts.add_row("memory", f"{show_bytes(summary.peak_bytes, binary=True)} at most on a rank")
    if summary.proof:
        facts.add_row("proof", summary.proof)
    if summary.checkpoints:
        facts.add_row("saved", "\n".join(summary.checkpoints))
    return Panel(facts, title=_title(summary), title_align="left", box=box.ROUNDED, expand=False)


def sparkline(values: Sequence[float], cells: int) -> str:
    """A curve of blocks, from the lowest value to the highest; each cell is a mean.

    Args:
        values: at least one; a cell that holds one that is not finite is a `!`.
        cells: at the most, at least 1.

    Returns:
        As many cells as there are values, if those are fewer; nothing where no cell is finite.

    Example:
        >>> sparkline([4.0, 4.0, 3.0, 2.0, 1.0, 1.0], cells=3)
        '█▅▁'
    """
    count = min(cells, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_block((mean - low) / span if span else 0.0) for mean in means)


def _table() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _peak(info: RunInfo) -> str:
    if info.peak_flops is None:
        return f"unknown, so no MFU: {info.peak_source}"
    return f"{show_rate(info.peak_flops)}, {info.peak_source}"


def _title(summary: Summary) -> Text:
    done = summary.last_step - summary.first_step
    what = "Interrupted" if summary.interrupted else "Trained"
    return Text.assemble(
        (f"{what} {summary.name}".rstrip(), "bold"),
        f": {done} steps, {show_count(summary.tokens)} tokens in {show_seconds(summary.seconds)}",
    )


def _losses(summary: Summary) -> str:
    first, last, few = summary.first_loss, summary.last_loss, summary.averaged_steps
    text = f"{first:.3f} -> {last:.3f} {_unit(summary)}"
    means = f", means of {few} steps" if few > 1 else ""
    before, after = summary.bits_per_byte(first), summary.bits_per_byte(last)
    if before is None or after is None:
        return text + means
    return f"{text}  ({before:.2f} -> {after:.2f} bits per byte{means})"


def _loss(loss: float, summary: Summary) -> str:
    bits = summary.bits_per_byte(loss)
    per_byte = "" if bits is None else f"  ({bits:.2f} bits per byte)"
    return f"{loss:.3f} {_unit(summary)}{per_byte}"


def _unit(summary: Summary) -> str:
    return "nats per byte" if summary.bytes_per_token == 1.0 else "nats per token"


def _speed(summary: Summary) -> str:
    pieces = [
        f"{summary.tokens_per_second:,.0f} tokens/s",
        show_rate(summary.flops_per_second),
    ]
    if summary.mfu is not None and summary.hfu is not None:
        pieces.append(f"MFU {summary.mfu:.1%}, HFU {summary.hfu:.1%}")
    return "; ".join(pieces)


def _goodput(summary: Summary) -> str:
    """How much of the time of all starts was training, and what most of the rest went to."""
    worst = sorted(summary.lost_seconds.items(), key=lambda item: -item[1])[:3]
    lost = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in worst)
    return f"{show_share(summary.goodput or 0.0)} of the time was training; lost: {lost}"


def _time_split(split: Mapping[str, float]) -> Table:
    """One line per share of the time, longest first, with a bar."""
    total = sum(split.values()) or 1.0
    table = Table.grid(padding=(0, 1))
    for name, seconds in sorted(split.items(), key=lambda item: -item[1]):
        share = seconds / total
        bar = "█" * round(share * BAR_CELLS)
        table.add_row(name, Text(f"{share:.0%}", justify="right"), show_seconds(seconds), bar)
    return table


def _block(height: float) -> str:
    if not 0.0 <= height <= 1.0:  # nan or infinite
        return "!"
    return BLOCKS[round(height * (len(BLOCKS) - 1))]


def _printable(text: str) -> str:
    """Generated text without control characters: they could command the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _join(numbers: Sequence[int]) -> str:
    return "+".join(str(number) for number in numbers)
