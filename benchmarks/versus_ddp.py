"""Two processes, dp=2: our ZeRO stages against torch's DDP and FSDP2 on the same plain model.

Bar: at most 1.05 times DDP. Both sides use gloo and the same number of threads.

python benchmarks/versus_ddp.py [--stages 0 1 2 3]
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import Result, describe, options, race, run_of, show
from ours import Trainer, give_weights, stream_of
from plain import Llama, Loop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.run import Run

RANKS = 2


def main() -> None:
    """Start the two processes; the first one reports."""
    parser = options(__doc__, threads=1)
    parser.set_defaults(layers=4)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], help="of ZeRO")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, str(Path(folder) / "store")), nprocs=RANKS)


def work(rank: int, args: Namespace, store: str) -> None:
    """One process: every contender, in turns, in step with the other process."""
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    run = run_of(args, f"dp={RANKS}", RANKS)
    theirs = {"DDP": Plain(run, rank, ddp(run)), "FSDP2": Plain(run, rank, fsdp(run))}
    ours = {
        f"phalanx zero={stage}": Trainer(run_of(args, f"dp={RANKS} zero={stage}", RANKS))
        for stage in args.stages
    }
    losses: dict[str, list[float]] = {}
    contenders = {name: noted(step, losses, name) for name, step in {**theirs, **ours}.items()}
    results = race(contenders, "DDP", args.rounds, dist.barrier)
    report(args, run, results, losses)
    dist.destroy_process_group()


def noted(
    step: Callable[[], float], losses: dict[str, list[float]], name: str
) -> Callable[[], None]:
    """The same step, its losses kept."""
    return lambda: losses.setdefault(name, []).append(step())


def report(
    args: Namespace, run: Run, results: list[Result], losses: dict[str, list[float]]
) -> None:
    """Print on the first process; all must have trained the same model."""
    table = torch.tensor(list(losses.values()), dtype=torch.float64)
    dist.all_reduce(table)
    worst = ((table - table[0]).abs() / table[0]).max().item()
    if dist.get_rank() == 0:
        title = f"dp=2, {args.threads} thread each, {describe(run)}; losses differ {worst:.1e}"
        show(title, results, run.recipe.tokens_per_step, args.json)
        if worst > 1e-4:
            raise SystemExit(f"they did not train the same model: {losses}")


class Plain:
    """Steps of the plain loop on this process's half of the batch."""

    def __init__(self, run: Run, rank: int, loop: Loop) -> None:
        share = run.recipe.batch // RANKS
        self.positions = range(rank * share, (rank + 1) * share)
        self.loop, self.stream, self.steps = loop, stream_of(run), 0

    def __call__(self) -> float:
        """One step; returns the mean loss of this half."""
        batch = self.stream.batch(self.steps, self.positions)
        self.steps += 1
        return self.loop.step(self.steps - 1, batch)


def ddp(run: Run) -> Loop:
    """Gradients are all-reduced once a step, while the last backward runs."""
    model = plain_model(run)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Loop(wrapped, run.recipe, run.layout.mb, unsynchronized=wrapped.no_sync)


def fsdp(run: Run) -> Loop:
    """Weights are gathered and gradients reduced at every micro-batch, as in our stage 3."""
    model = plain_model(run)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Loop(model, run.recipe, run.layout.mb)


def plain_model(run: Run) -> Llama:
    """With our initial weights."""
    model = Llama(run.model, run.recipe.seq)
    give_weights(run, model)
    return model


if __name__ == "__main__":
    main()
