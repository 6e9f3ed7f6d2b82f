"""Two processes, tp=2: parts multiplied while others travel, against products of whole messages.

What a rank waits for along tp and cannot hide is the time that overlap is meant to save.

    python benchmarks/overlap.py [--precision bf16] [--hidden 1024]
"""

import statistics
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import describe, options, race, run_of, show
from ours import Trainer

from phalanx.core.run import Run
from phalanx.trainer.model.block import Block
from phalanx.trainer.parallel.tensor import TensorParallel

RANKS = 2


class InWholeMessages(TensorParallel):
    """A product waits for the whole of what it needs, and is sent when all of it is there."""

    in_parts = False  # type: ignore[assignment]  # a property there


class Timed:
    """A trainer whose waits are noted, step by step."""

    def __init__(self, run: Run, *, in_parts: bool) -> None:
        self.trainer = Trainer(run)
        self.ledger = self.trainer.engine.mesh.ledger
        self.losses: list[float] = []
        self.waits: list[float] = []
        for stage in self.trainer.engine.executor.stages.values():
            for part in stage.parts:
                if not in_parts and isinstance(part, Block):
                    part.attention.tp.__class__ = InWholeMessages  # one object for the stage

    def __call__(self) -> None:
        """One step."""
        self.ledger.clear()
        self.losses.append(self.trainer())
        self.waits.append(self.ledger.waited.get("tensor", 0.0))


def main() -> None:
    """Start the two processes; the first one reports."""
    parser = options(__doc__, threads=1)
    parser.set_defaults(layers=4)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, str(Path(folder) / "store")), nprocs=RANKS)


def work(rank: int, args: Namespace, store: str) -> None:
    """One process: both ways in turns, in step with the other process."""
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    run = run_of(args, f"tp={RANKS} precision={args.precision}")
    ways = {
        "whole messages": Timed(run, in_parts=False),
        "in parts": Timed(run, in_parts=True),
    }
    results = race(ways, "whole messages", args.rounds, dist.barrier)
    if rank == 0:
        waits = "; ".join(
            f"{name}, rank 0 waits {statistics.median(way.waits[1:]):.3f} s a step for tp"
            for name, way in ways.items()
        )
        title = f"{args.precision}, {args.threads} threads, {describe(run)}; {waits}"
        show(title, results, run.recipe.tokens_per_step, args.json)
        worst = max(
            abs(a - b) / b for a, b in zip(*(way.losses for way in ways.values()), strict=True)
        )
        if worst > (1e-4 if args.precision == "fp32" else 1e-2):
            raise SystemExit(f"the two did not train the same model: losses differ {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
