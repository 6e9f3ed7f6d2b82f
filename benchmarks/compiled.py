"""One process: our step with blocks that torch.compile fuses, beside ours without and plain ones.

The plain loop's blocks are compiled in the same way, one graph for all. Bar: at most 1.05 times.

    python benchmarks/compiled.py [--precision bf16]
"""

from collections.abc import Callable
from itertools import count

import torch
from measure import describe, options, race, run_of, show
from ours import Trainer, give_weights, stream_of
from plain import Llama, Loop

from phalanx.core.run import Run


def plain_loop(run: Run, *, compiled: bool, bf16: bool) -> Callable[[], float]:
    """Steps of the plain loop."""
    model = Llama(run.model, run.recipe.seq)
    give_weights(run, model)
    for block in model.blocks if compiled else ():
        block.compile(fullgraph=True, dynamic=False)
    loop = Loop(model, run.recipe, run.layout.mb, bf16=bf16)
    stream, numbers = stream_of(run), count()

    def step() -> float:
        i = next(numbers)
        return loop.step(i, stream.batch(i, range(run.recipe.batch)))

    return step


def main() -> None:
    """Race the four; all must compute the same losses."""
    parser = options(__doc__, threads=1)
    parser.set_defaults(layers=4)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bf16 = args.precision == "bf16"
    run = run_of(args, f"dp=1 precision={args.precision}")
    steps = {
        "plain": plain_loop(run, compiled=False, bf16=bf16),
        "plain, compiled": plain_loop(run, compiled=True, bf16=bf16),
        "phalanx": Trainer(run),
        "phalanx compile=on": Trainer(run_of(args, f"dp=1 precision={args.precision} compile=on")),
    }
    losses: dict[str, list[float]] = {name: [] for name in steps}
    contenders = {
        name: lambda step=step, name=name: losses[name].append(step())
        for name, step in steps.items()
    }
    results = race(contenders, "plain, compiled", args.rounds)
    reference = losses["plain"]
    worst = max(
        abs(a - b) / b for found in losses.values() for a, b in zip(found, reference, strict=True)
    )
    title = f"{args.precision}, {args.threads} threads, {describe(run)}; losses differ {worst:.1e}"
    show(title, results, run.recipe.tokens_per_step, args.json)
    if worst > (1e-4 if args.precision == "fp32" else 1e-2):
        raise SystemExit(f"they did not train the same model: {losses}")


if __name__ == "__main__":
    main()
