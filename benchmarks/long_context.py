"""What a long sequence costs a rank in memory, when the ranks along cp share it.

One whole training step for each length: every byte that the process holds at its worst moment, as
the system counts it. Less what the process holds before there is a model, it should grow as the
tokens of one rank do, and not with their square.

    python benchmarks/long_context.py [--cp 4] [--context ring] [--seqs 4096 8192 16384 32768]
"""

import ctypes
import gc
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from phalanx.core.layout import CONTEXTS, Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.data.synthetic import SyntheticStream
from phalanx.oracle.pool import RankPool
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh

LIMIT = 4 << 30  # what a rank may hold in all
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Step(NamedTuple):
    """One step on one rank.

    Attributes:
        before: bytes held before there is a model.
        peak: bytes held at most.
        seconds: of the step.
        waited: of them for keys and values of other ranks.
        loss: of the step.
    """

    before: int
    peak: int
    seconds: float
    waited: float
    loss: float


class Row(NamedTuple):
    """One length, all ranks together.

    Attributes:
        seq: tokens of the sequence.
        local: of them on each rank.
        before, peak: bytes of the largest rank.
        growth: bytes that each further local token has cost since the row before.
        seconds: of the step.
        waited: of them for keys and values, on the rank that waited least: the others also wait
            for whoever is late.
    """

    seq: int
    local: int
    before: int
    peak: int
    growth: float
    seconds: float
    waited: float


def take_a_step(run: Run) -> Step:
    """On one rank: build the model, and learn from one sequence."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = held("VmRSS")
    _RESET.write_text("5", encoding="ascii")
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    recipe = run.recipe
    stream = SyntheticStream(run.model.vocab, recipe.seq, recipe.batch, recipe.seed)
    batch = stream.batch(0, engine.positions())
    start = time.perf_counter()
    loss = train_step(engine, 0, batch).loss
    for unit in engine.units:
        unit.acquire()  # the new weights, before anybody leaves
    waited = engine.mesh.ledger.waited.get("context", 0.0)
    return Step(before, held("VmHWM"), time.perf_counter() - start, waited, loss)


def held(key: str) -> int:
    """Bytes of memory of this process, by a name in /proc/self/status."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def measure(pool: RankPool, run: Run, last: Row | None) -> Row:
    """All ranks, one length."""
    steps: list[Step] = pool.run(run.layout.ranks, take_a_step, run)
    local = run.recipe.seq // run.layout.cp
    largest = max(steps, key=lambda step: step.peak - step.before)
    growth = 0.0
    if last is not None:
        more = largest.peak - largest.before - (last.peak - last.before)
        growth = more / (local - last.local)
    return Row(
        seq=run.recipe.seq,
        local=local,
        before=largest.before,
        peak=largest.peak,
        growth=growth,
        seconds=max(step.seconds for step in steps),
        waited=min(step.waited for step in steps),
    )


def arguments() -> Namespace:
    """What the program takes."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--cp", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--context", choices=CONTEXTS, default="ring", help="(default ring)")
    parser.add_argument("--layout", default="", help="more of the layout, as in recompute=full")
    lengths = [4096, 8192, 16384, 32768]
    parser.add_argument("--seqs", type=int, nargs="+", default=lengths, help=f"(default {lengths})")
    for name, value in (("layers", 4), ("hidden", 128), ("heads", 4), ("ffn", 384)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default {value})")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def main() -> None:
    """Measure each length, and say whether the largest fits."""
    args = arguments()
    shape = ModelShape(
        layers=args.layers, hidden=args.hidden, heads=args.heads, ffn=args.ffn, vocab=256
    )
    layout = Layout.parse(f"cp={args.cp} context={args.context} {args.layout}")
    run = Run(model=shape, layout=layout, recipe=Recipe(batch=layout.dp, seq=min(args.seqs)))
    rows: list[Row] = []
    with RankPool(layout.ranks) as pool:
        pool.run(layout.ranks, take_a_step, run)  # libraries allocate what they keep
        for seq in sorted(args.seqs):
            one = replace(run, recipe=replace(run.recipe, seq=seq))
            rows.append(measure(pool, one, rows[-1] if rows else None))
    show(run, rows, args.json)
    if rows[-1].peak > LIMIT:
        raise SystemExit(f"{rows[-1].seq} tokens need {rows[-1].peak >> 20} MiB on a rank")


def show(run: Run, rows: list[Row], as_json: bool) -> None:
    """Print a table, or one JSON document."""
    title = f"{run.layout}, {run.model.params() / 1e6:.2f} M parameters"
    if as_json:
        document = {"schema": 1, "title": title, "rows": [row._asdict() for row in rows]}
        print(json.dumps(document, indent=2))
        return
    table = Table(title=title, title_justify="left")
    for column in ("tokens", "on a rank", "MiB at most", "of the step", "bytes/token", "s", "wait"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.seq:,}",
            f"{row.local:,}",
            f"{row.peak / 2**20:,.0f}",
            f"{(row.peak - row.before) / 2**20:,.0f}",
            f"{row.growth:,.0f}" if row.growth else "",
            f"{row.seconds:.1f}",
            f"{row.waited:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    main()
