"""One process: our step against the same model in a plain PyTorch loop. Bar: at most 1.05 times.

python benchmarks/plain_loop.py [--precision bf16] [--kv-heads 2]
"""

import torch
from measure import describe, options, race, run_of, show
from ours import Trainer, give_weights, stream_of
from plain import Llama, Loop


def main() -> None:
    """Race the two; both must compute the same losses."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = run_of(args, f"dp=1 precision={args.precision}")
    trainer = Trainer(run)
    model = Llama(run.model, run.recipe.seq)
    give_weights(run, model)
    loop = Loop(model, run.recipe, run.layout.mb, bf16=args.precision == "bf16")
    stream = stream_of(run)
    ours: list[float] = []
    theirs: list[float] = []

    def plain() -> None:
        step = len(theirs)
        theirs.append(loop.step(step, stream.batch(step, range(run.recipe.batch))))

    results = race(
        {"plain": plain, "phalanx": lambda: ours.append(trainer())}, "plain", args.rounds
    )
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    title = f"{args.precision}, {args.threads} threads, {describe(run)}; losses differ {worst:.1e}"
    show(title, results, run.recipe.tokens_per_step, args.json)
    if worst > (1e-4 if args.precision == "fp32" else 1e-2):
        raise SystemExit(f"the two did not train the same model: {ours} and {theirs}")


if __name__ == "__main__":
    main()
