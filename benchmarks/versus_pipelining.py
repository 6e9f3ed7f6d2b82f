"""Two processes, pp=2: our schedules against those of torch.distributed.pipelining.

Both sides train the same plain Llama from the same weights on the same micro-batches, clip by the
norm over both stages and take the same AdamW step; both use gloo and the same number of threads.
Bar: each of our schedules is at least as fast as torch's of the same name.

python benchmarks/versus_pipelining.py
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from measure import Result, describe, options, race, run_of, show
from ours import Trainer, give_weights, stream_of
from plain import Llama, adamw
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from phalanx.core.run import Run
from phalanx.schedules.layouts import layers_of_stages, placement

RANKS = 2
SCHEDULES = {  # ours: theirs
    "1f1b": Schedule1F1B,
    "interleaved v=2": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


def main() -> None:
    """Start the two processes; the first one reports."""
    parser = options(__doc__, threads=1)
    parser.set_defaults(layers=4, batch=8, mb=1, seq=256, vocab=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, str(Path(folder) / "store")), nprocs=RANKS)


def work(rank: int, args: Namespace, store: str) -> None:
    """One process: every schedule of both sides, in turns."""
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    losses: dict[str, list[float]] = {}
    contenders: dict[str, Callable[[], None]] = {}
    for name in SCHEDULES:
        run = run_of(args, f"pp={RANKS} schedule={name}")
        for side, step in (("torch", Theirs(run, rank, name)), ("phalanx", Trainer(run))):
            contenders[f"{side} {name}"] = noted(step, losses, f"{side} {name}")
    results = race(contenders, "torch 1f1b", args.rounds, dist.barrier)
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
    worst = ((table - table[0]).abs() / table[0]).max().item()
    if dist.get_rank() == 0:
        title = f"pp=2, {args.threads} thread each, {describe(run)}; losses differ {worst:.1e}"
        show(title, results, run.recipe.tokens_per_step, args.json)
        if worst > 1e-4:
            raise SystemExit(f"they did not train the same model: {losses}")


class Slice(nn.Module):
    """A few blocks of the plain model, with the embedding before them or the head behind."""

    def __init__(self, whole: Llama, layers: range) -> None:
        super().__init__()
        last = layers.stop == len(whole.blocks)
        self.embedding = whole.embedding if layers.start == 0 else None
        self.blocks = whole.blocks[layers.start : layers.stop]
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)
        self.cos, self.sin = whole.cos, whole.sin

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations to activations or logits."""
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


class Theirs:
    """Steps of one of torch's schedules over the stages where our placement has them."""

    def __init__(self, run: Run, rank: int, name: str) -> None:
        self.run, self.stream, self.steps = run, stream_of(run), 0
        where, model = placement(run.layout), Llama(run.model, run.recipe.seq)
        give_weights(run, model)
        held = where.stages_of(rank)
        self.first, self.last = 0 in held, where.depth - 1 in held
        slices = self._slices(model, held)
        stages = [
            PipelineStage(part, index, where.depth, torch.device("cpu"))
            for part, index in zip(slices, held, strict=True)
        ]
        self.parameters = [p for part in slices for p in part.parameters()]
        self.optimizer = adamw(self.parameters, run.recipe)
        held_stages = stages[0] if name == "1f1b" else stages
        self.schedule = SCHEDULES[name](held_stages, run.micro_batches, loss_fn=mean_loss)

    def _slices(self, model: Llama, held: Sequence[int]) -> list[Slice]:
        layers = layers_of_stages(self.run.layout, self.run.model.layers)
        starts = [sum(layers[:index]) for index in held]
        return [
            Slice(model, range(start, start + layers[index]))
            for start, index in zip(starts, held, strict=True)
        ]

    def __call__(self) -> float:
        """One step; the loss, on both processes."""
        batch = self.stream.batch(self.steps, range(self.run.recipe.batch))
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        tokens = [torch.from_numpy(batch.tokens)] if self.first else []
        if self.last:
            self.schedule.step(*tokens, target=torch.from_numpy(batch.targets), losses=losses)
        else:
            self.schedule.step(*tokens)
        self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.recipe.learning_rate_at(self.steps)
        self.optimizer.step()
        self.steps += 1
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()

    def _clip(self) -> None:
        """By the norm over both processes."""
        norms = torch.stack([p.grad.norm() for p in self.parameters if p.grad is not None])
        total = norms.square().sum()
        dist.all_reduce(total)
        nn.utils.clip_grads_with_norm_(self.parameters, self.run.recipe.clip, total.sqrt())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Of one micro-batch; torch divides the gradients by how many there are."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
