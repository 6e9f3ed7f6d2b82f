"""Shows a training run on a screen: a live line, or plain lines, and a summary at the end.

The rank that reports is another process than the command, so a `Screen` says in a few words how
to write, and travels there.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phalanx.cli.stream import LossyStream
from phalanx.cli.summary import print_summary, show_info
from phalanx.core.units import show_bytes, show_count, show_rate
from phalanx.trainer.run.report import Reporter, RunInfo, Silent, StepMetrics, Summary

PLAIN_LINES = 20  # in a whole run, when nobody sits at a terminal
REFRESH_SECONDS = 0.1
MOST_BAR_CELLS = 24
LEAST_BAR_CELLS = 8
PLAIN_WIDTH = 100


@dataclass(frozen=True)
class Screen:
    """How a run is to be shown.

    Attributes:
        quiet: not at all.
        errors: on stderr, since stdout is for a JSON document.
    """

    quiet: bool = False
    errors: bool = False

    def reporter(self) -> Reporter:
        """The reporter for the stream of this process: live on a terminal, plain lines else."""
        if self.quiet:
            return Silent()
        console = open_console(sys.stderr if self.errors else sys.stdout)
        if console.is_terminal and not console.is_dumb_terminal:
            return LiveReporter(console)
        return PlainReporter(console)


class PlainReporter:
    """Writes one line every so many steps: for log files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._every = 1

    def on_start(self, info: RunInfo) -> None:
        """Say what is about to be trained, and choose how often to speak."""
        self._every = max(1, (info.steps - info.first_step) // PLAIN_LINES)
        if not info.attempt:
            self._console.print(show_info(info))

    def on_step(self, metrics: StepMetrics) -> None:
        """Write a line if it is time for one; the last step always has its own."""
        last = metrics.step == metrics.steps
        if metrics.step % self._every == 0 or last or metrics.skipped or metrics.step == 1:
            self._console.print("  ".join(describe_step(metrics)), soft_wrap=True)

    def on_validation(self, step: int, loss: float) -> None:
        """Write the loss on held-out text.

        Args:
            step: how many steps are done.
            loss: nats per token, a mean over the held-out text.
        """
        self._console.print(f"step {step}: loss on held-out text {loss:.4f}")

    def on_event(self, text: str) -> None:
        """Write what happened."""
        self._console.print(text, soft_wrap=True)

    def on_end(self, summary: Summary) -> None:
        """Write the summary."""
        print_summary(self._console, summary)


class LiveReporter:
    """Redraws one line at the bottom of a terminal; events scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def on_start(self, info: RunInfo) -> None:
        """Say what is about to be trained, and open the live line."""
        if not info.attempt:
            self._console.print(show_info(info))
        self._live.start()

    def on_step(self, metrics: StepMetrics) -> None:
        """Redraw the line, at most ten times a second."""
        now = time.monotonic()
        if metrics.step < metrics.steps and now - self._drawn_at < REFRESH_SECONDS:
            return
        self._drawn_at = now
        self._live.update(live_line(metrics, self._console.width), refresh=True)

    def on_validation(self, step: int, loss: float) -> None:
        """Let the loss on held-out text scroll by.

        Args:
            step: how many steps are done.
            loss: nats per token, a mean over the held-out text.
        """
        self.on_event(f"step {step}: loss on held-out text {loss:.4f}")

    def on_event(self, text: str) -> None:
        """Let a line scroll by."""
        self._console.print(Text(text, style="dim"))

    def on_end(self, summary: Summary) -> None:
        """Close the live line and show the summary."""
        self._live.stop()
        print_summary(self._console, summary)


def open_console(stream: TextIO) -> Console:
    """A console on one of the standard streams; plain and 100 cells wide if it is no terminal."""
    width = None if stream.isatty() else PLAIN_WIDTH
    file = cast("IO[str]", LossyStream(stream))
    return Console(file=file, width=width, highlight=False, markup=False)


def describe_step(metrics: StepMetrics) -> list[str]:
    """What one step measured, in short pieces, in the order that a line shows them."""
    waiting = metrics.data_wait_seconds / metrics.seconds if metrics.seconds > 0 else 0.0
    pieces = [
        f"step {metrics.step:>{len(str(metrics.steps))}}/{metrics.steps}",
        f"loss {metrics.loss:.4f}",
        f"{show_count(metrics.tokens_per_second)} tok/s",
        _utilisation(metrics),
        f"left {clock(metrics.seconds_left)}",
        f"{show_bytes(metrics.peak_bytes, binary=True)}",
        f"data wait {waiting:.0%}",
        f"norm {metrics.grad_norm:.3g}",
        f"lr {metrics.learning_rate:.2e}",
    ]
    return [*pieces[:2], "SKIPPED: not finite", *pieces[2:]] if metrics.skipped else pieces


def clock(seconds: float) -> str:
    """A duration as a clock shows it: `1:05`, `2:03:04`.

    Example:
        >>> clock(65.2), clock(7384)
        ('1:05', '2:03:04')
    """
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _utilisation(metrics: StepMetrics) -> str:
    if metrics.mfu is None or metrics.hfu is None:
        return show_rate(metrics.flops_per_second)
    return f"MFU {metrics.mfu:.1%} HFU {metrics.hfu:.1%}"


def live_line(metrics: StepMetrics, width: int) -> RenderableType:
    """As many pieces as fit, and a bar if there is room left.

    Args:
        metrics: of the step that was done last.
        width: cells of the terminal; a bar takes 8 to 24 of them, and one beside it.
    """
    text = fit(describe_step(metrics), width)
    cells = min(MOST_BAR_CELLS, width - len(text) - 1)
    if cells < LEAST_BAR_CELLS:
        return text
    row = Table.grid(padding=(0, 1, 0, 0))
    bar = ProgressBar(total=metrics.steps, completed=metrics.step, width=cells)
    row.add_row(bar, text)
    return row


def fit(pieces: Sequence[str], width: int) -> Text:
    """Join pieces with two spaces, leaving off the last ones that do not fit.

    Args:
        pieces: in the order of their worth; the first one stays, and is cropped if it must be.
        width: cells of the line.

    Example:
        >>> fit(["step 3/10", "loss 2.1000", "left 1:05"], 24).plain
        'step 3/10  loss 2.1000'
    """
    line = Text(no_wrap=True, overflow="crop")
    for piece in pieces:
        gap = "  " if line else ""
        if line and len(line) + len(gap) + len(piece) > width:
            break
        line.append(gap).append(piece, style="bold" if piece.startswith("loss") else "")
    return line
