"""What one GPU reaches: seconds, MFU and peak memory of a step, beside what was planned.

By default Llama-3.2-1B at 4,096 tokens in bf16, with and without compiled blocks; a few minutes.
Where there is no GPU it says so and measures nothing.

python benchmarks/one_gpu.py [--model llama-3.2-1b] [--seq 4096] [--mb 1 2 4]
"""

import json
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from phalanx.catalog.load import model
from phalanx.core.layout import Layout
from phalanx.core.run import Recipe, Run
from phalanx.cost.flops import flops_per_token
from phalanx.cost.memory import rank_memory
from phalanx.data.synthetic import SyntheticStream
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.peak import known_peak


@dataclass(frozen=True)
class Measured:
    """One layout: median seconds of a step, MFU, and peak bytes beside those planned."""

    layout: str
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_bytes: int
    planned_bytes: float


def main() -> int:
    """Measure and print."""
    args = _arguments()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured", file=sys.stderr)
        return 1
    rows = [measure(run, args.steps) for run in _runs(args)]
    if args.json:
        print(json.dumps({"schema": 1, "rows": [asdict(row) for row in rows]}))
    else:
        _show(args, rows)
    return 0


def _arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", help="a name of the catalog")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=10, help="timed, after three that are not")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _runs(args: Namespace) -> Iterator[Run]:
    for mb in args.mb:
        for rest in ("", " recompute=full", " compile=on"):
            layout = Layout.parse(f"mb={mb} precision=bf16{rest}")
            recipe = Recipe(seq=args.seq, batch=4 * mb)
            yield Run(model=model(args.model), layout=layout, recipe=recipe)


def measure(run: Run, steps: int) -> Measured:
    """Take a few steps of one layout; a GPU's clock times each."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine = build_engine(run, build_mesh(run.layout, device, kv_heads=run.model.kv_heads))
    seconds = statistics.median(_seconds(engine, steps))
    rate = run.recipe.tokens_per_step / seconds
    peak = known_peak(torch.cuda.get_device_name(device), run.layout.precision)
    flops = flops_per_token(run.model, run.recipe.seq, causal=True)
    planned = rank_memory(run.model, run.layout, run.recipe.seq, 0, 1.0)
    return Measured(
        layout=str(run.layout),
        step_seconds=seconds,
        tokens_per_second=rate,
        mfu=rate * flops / peak if peak else None,
        peak_bytes=torch.cuda.max_memory_allocated(),
        planned_bytes=planned.allocated,
    )


def _seconds(engine: Engine, steps: int) -> Iterator[float]:
    """Each step's time, after three steps that compile, allocate and warm up."""
    recipe = engine.run.recipe
    stream = SyntheticStream(engine.run.model.vocab, recipe.seq, recipe.batch, recipe.seed)
    for step in range(3 + steps):
        batch = stream.batch(step, engine.positions())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        train_step(engine, step, batch)
        end.record()
        end.synchronize()
        if step >= 3:
            yield start.elapsed_time(end) / 1000


def _show(args: Namespace, rows: list[Measured]) -> None:
    name = torch.cuda.get_device_name()
    table = Table(title=f"{args.model}, {args.seq} tokens, {name}; MFU counts causal attention")
    for column in ("layout", "step", "tokens/s", "MFU", "peak", "planned"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        table.add_row(
            row.layout,
            f"{row.step_seconds * 1000:.0f} ms",
            f"{row.tokens_per_second:,.0f}",
            "-" if row.mfu is None else f"{row.mfu:.1%}",
            f"{row.peak_bytes / 2**30:.1f} GiB",
            f"{row.planned_bytes / 2**30:.1f} GiB",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
