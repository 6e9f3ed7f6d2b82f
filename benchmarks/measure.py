"""Times things against each other on a machine that is not quiet: in turns, and by ratios.

One round times each contender once, in an order that is reversed every other round. The ratio of
two contenders in one round cancels what the machine was busy with; the median over the rounds is
reported, with the range of its middle half.
"""

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run

Contender = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """How many times the seconds of another: median over rounds, and quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One contender.

    Attributes:
        name: what it is.
        seconds: median of a step.
        wall: by the clock, relative to the baseline.
        cpu: by the processor time of this process, which other programs disturb less.
    """

    name: str
    seconds: float
    wall: Ratio
    cpu: Ratio


def race(
    contenders: Mapping[str, Contender],
    baseline: str,
    rounds: int,
    fence: Callable[[], object] = lambda: None,
) -> list[Result]:
    """Time all contenders in turns, after one untimed turn each.

    Args:
        contenders: what to call, by name.
        baseline: which of them the others are compared with.
        rounds: how often each is timed.
        fence: returns when all processes have called it; the slowest of them is timed.
    """
    names = list(contenders)
    for name in names:
        contenders[name]()
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            fence()
            start, used = time.perf_counter(), time.process_time()
            contenders[name]()
            fence()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
    return [
        Result(
            name=name,
            seconds=statistics.median(wall[name]),
            wall=ratio(wall[name], wall[baseline]),
            cpu=ratio(cpu[name], cpu[baseline]),
        )
        for name in names
    ]


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Round by round."""
    ratios = sorted(a / b for a, b in zip(mine, theirs, strict=True))
    if len(ratios) < 2:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def show(title: str, results: Sequence[Result], tokens: int, as_json: bool) -> None:
    """Print a table, or one JSON document."""
    if as_json:
        rows = [
            {
                "name": r.name,
                "seconds": r.seconds,
                "tokens_per_second": tokens / r.seconds,
                "wall_ratio": vars(r.wall),
                "cpu_ratio": vars(r.cpu),
            }
            for r in results
        ]
        print(json.dumps({"schema": 1, "title": title, "results": rows}, indent=2))
        return
    table = Table(title=title, title_justify="left")
    for column in (
        "",
        "s/step",
        "tokens/s",
        "x by clock",
        "middle half",
        "x by CPU",
        "middle half",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for r in results:
        table.add_row(
            r.name,
            f"{r.seconds:.3f}",
            f"{tokens / r.seconds:,.0f}",
            f"{r.wall.median:.3f}",
            f"{r.wall.low:.3f} - {r.wall.high:.3f}",
            f"{r.cpu.median:.3f}",
            f"{r.cpu.low:.3f} - {r.cpu.high:.3f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def options(description: str | None, threads: int) -> ArgumentParser:
    """What all benchmarks take: the size of the model and of the step."""
    parser = ArgumentParser(description=description)
    for name, value, text in (
        ("layers", 8, "L"),
        ("hidden", 512, "h"),
        ("heads", 8, "query heads"),
        ("kv-heads", 8, "key and value heads"),
        ("ffn", 1408, "f"),
        ("vocab", 4096, "V"),
        ("seq", 512, "tokens per sequence"),
        ("batch", 4, "sequences per step and process"),
        ("mb", 2, "sequences per micro-batch"),
        ("threads", threads, "of each process"),
        ("rounds", 7, "how often each is timed"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run_of(args: Namespace, layout: str, ranks: int = 1) -> Run:
    """The run that the options describe, under a layout."""
    shape = ModelShape(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        kv_heads=args.kv_heads,
        ffn=args.ffn,
        vocab=args.vocab,
        tied=args.tied,
    )
    recipe = Recipe(seq=args.seq, batch=args.batch * ranks, steps=1000, warmup=10)
    return Run(model=shape, layout=Layout.parse(f"{layout} mb={args.mb}"), recipe=recipe)


def describe(run: Run) -> str:
    """The size of a step, in one line."""
    m, r = run.model, run.recipe
    return (
        f"{m.params() / 1e6:.1f} M parameters (L={m.layers} h={m.hidden} a={m.heads} "
        f"g={m.kv_heads} f={m.ffn} V={m.vocab}), batch {r.batch} x {r.seq}, mb={run.layout.mb}"
    )
