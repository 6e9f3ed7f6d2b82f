"""Where the time of a step goes, and what share of this machine's matrix-product rate it reaches.

Three tables: the rate of every product of a block, by torch and by `phalanx.trainer.ops.kernels`;
the achieved FLOP/s of the step against the best rate; the step's time by what it was spent on.

python benchmarks/gemm_share.py [--precision bf16]
"""

import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from measure import describe, options, run_of
from ours import Trainer
from rich.console import Console
from rich.table import Table
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.core.model import ModelShape
from phalanx.cost.flops import flops_per_token
from phalanx.trainer.engine.step import forward_backward, update
from phalanx.trainer.ops.kernels import times
from phalanx.trainer.precision.dtypes import Dtypes

# what an event is spent on, by its own name or that of the nearest event around it
KINDS = {
    "aten::mm": "matrix products",
    "aten::addmm": "matrix products",
    "mkldnn::_linear_pointwise": "matrix products",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "_CrossEntropy": "loss",
    "_CrossEntropyBackward": "loss",
    "_RMSNorm": "norms",
    "_RMSNormBackward": "norms",
    "_SwiGLU": "SwiGLU",
    "_SwiGLUBackward": "SwiGLU",
    "_Rotate": "rotary positions",
    "_RotateBackward": "rotary positions",
    "torch::autograd::AccumulateGrad": "adding up gradients",
    "update": "norm, clip and AdamW",
    "batch": "batch",
    "forward and backward": "residuals, copies, Python",
}

SIDE = 1024
SQUARES = 5  # before a step, and as many after it


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = run_of(args, f"dp=1 precision={args.precision}")
    dtype = Dtypes.named(args.precision, torch.device("cpu")).compute
    rates = product_rates(run.model, args.mb * args.seq, dtype, args.rounds)
    trainer = Trainer(run)
    trainer()
    laps = [against_square(trainer, dtype) for _ in range(args.rounds)]
    flops = flops_per_token(run.model, run.recipe.seq, causal=True) * run.recipe.tokens_per_step
    seconds, by_torch, by_ours = (statistics.median(column) for column in zip(*laps, strict=True))
    document = {
        "schema": 1,
        "title": f"{args.precision}, {args.threads} threads, {describe(run)}",
        "products": rates,
        "step_seconds": seconds,
        "step_flops": flops,
        "flops_per_second": flops / seconds,
        "share_of_torch_square": flops / by_torch,
        "share_of_our_square": flops / by_ours,
        "spent": spent(trainer),
    }
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        show(document, args)


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def against_square(trainer: Trainer, dtype: torch.dtype) -> tuple[float, float, float]:
    """Seconds of a step, and the FLOP of square products that torch and we do in that time.

    The products are timed just before and just after the step.
    """
    x, w = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    products = (lambda: x @ w.t()), (lambda: times(x, w))
    laps: tuple[list[float], list[float]] = ([], [])
    seconds = 0.0
    for turn in range(2):
        for _ in range(SQUARES):
            for product, lap in zip(products, laps, strict=True):
                lap.append(timed(product))
        if turn == 0:
            seconds = timed(trainer)
    by_torch, by_ours = (2 * SIDE**3 / statistics.mean(lap) for lap in laps)
    return seconds, seconds * by_torch, seconds * by_ours


def product_rates(
    shape: ModelShape, rows: int, dtype: torch.dtype, rounds: int
) -> list[dict[str, Any]]:
    """FLOP/s of the products of a step, and of a square one, by torch and by ours.

    Args:
        shape: the model.
        rows: tokens of a micro-batch.
        dtype: of the matrices.
        rounds: how often each is timed; the median counts.
    """
    h, f, query, key = (
        shape.hidden,
        shape.ffn,
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    sizes = {"square": (SIDE, SIDE, SIDE), "q": (rows, query, h), "k, v": (rows, key, h)}
    sizes |= {"o": (rows, h, query), "gate, up": (rows, f, h), "down": (rows, h, f)}
    sizes |= {"head": (rows, shape.vocab, h)}
    table = []
    for name, (m, n, k) in sizes.items():
        x, w, g = (torch.randn(*size).to(dtype) for size in ((m, k), (n, k), (m, n)))
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda x=x, w=w: x @ w.t(),
            "forward_ours": lambda x=x, w=w: times(x, w),
            "input_gradient": lambda g=g, w=w: g @ w,
            "input_gradient_ours": lambda g=g, w=w: times(g, w.t()),
            "weight_gradient": lambda g=g, x=x: g.t() @ x,
        }
        laps = {key: [timed(call)] for key, call in calls.items()}
        for _ in range(2 * rounds):
            for key, call in calls.items():
                laps[key].append(timed(call))
        speed = {key: 2 * m * n * k / statistics.median(lap[1:]) for key, lap in laps.items()}
        table.append({"product": name, "m": m, "n": n, "k": k, **speed})
    return table


def spent(trainer: Trainer) -> dict[str, float]:
    """Share of one step by what it was spent on."""
    engine, step = trainer.engine, trainer.steps
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("batch"):
            batch = trainer.stream.batch(step, engine.positions())
        with record_function("forward and backward"):
            loss = forward_backward(engine, step, batch)
        with record_function("update"):
            update(engine, loss)
    trainer.steps += 1
    shares = dict.fromkeys(KINDS.values(), 0.0)
    for event in profiler.events() or ():
        shares[kind_of(event)] += event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: share / total for kind, share in shares.items()}


def kind_of(event: FunctionEvent) -> str:
    """What an event is spent on; backward of what has no name of its own is "residuals"."""
    around: FunctionEvent | None = event
    while around is not None:
        if around.name in KINDS:
            return KINDS[around.name]
        around = around.cpu_parent
    return KINDS["forward and backward"]


def show(document: dict[str, Any], args: Namespace) -> None:
    """Print the three tables."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(document["title"])
    table = Table(title="GFLOP/s of products, torch / ours", title_justify="left")
    for column in ("", "m x n x k", "forward", "input gradient", "weight gradient"):
        table.add_column(column, justify="right" if column else "left")
    for row in document["products"]:
        forward, inputs, weights = (
            f"{row[key] / 1e9:.0f}" for key in ("forward", "input_gradient", "weight_gradient")
        )
        table.add_row(
            row["product"],
            f"{row['m']} x {row['n']} x {row['k']}",
            f"{forward} / {row['forward_ours'] / 1e9:.0f}",
            f"{inputs} / {row['input_gradient_ours'] / 1e9:.0f}",
            weights,
        )
    console.print(table)
    by_torch, by_ours = document["share_of_torch_square"], document["share_of_our_square"]
    console.print(
        f"step: {document['step_flops'] / 1e9:,.0f} GFLOP in {document['step_seconds']:.2f} s = "
        f"{document['flops_per_second'] / 1e9:.0f} GFLOP/s: {by_torch:.0%} of the rate of torch's "
        f"square product, {by_ours:.0%} of ours"
    )
    table = Table(title="where the time of a step goes", title_justify="left")
    table.add_column("")
    table.add_column("share", justify="right")
    for kind, share in sorted(document["spent"].items(), key=lambda item: -item[1]):
        table.add_row(kind, f"{share:.1%}")
    console.print(table)


if __name__ == "__main__":
    main()
