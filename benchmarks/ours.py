"""Our side of a comparison: steps of the trainer, and its weights for the other side."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phalanx.core.run import Run
from phalanx.data.batches import Stream
from phalanx.data.synthetic import SyntheticStream
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.model.inventory import declarations
from phalanx.trainer.model.parameters import Initial
from phalanx.trainer.parallel.mesh import build_mesh


def stream_of(run: Run) -> Stream:
    """The batches that both sides learn from."""
    return SyntheticStream(run.model.vocab, run.recipe.seq, run.recipe.batch, run.recipe.seed)


class Trainer:
    """Takes one step of `run` whenever it is called; returns the loss."""

    def __init__(self, run: Run) -> None:
        self.engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
        self.stream, self.steps = stream_of(run), 0

    def __call__(self) -> float:
        """One step."""
        batch = self.stream.batch(self.steps, self.engine.positions())
        result = train_step(self.engine, self.steps, batch)
        self.steps += 1
        return result.loss


def initial_weights(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by its global name, as training starts."""
    source = Initial(run.recipe.seed, run.recipe.init_std, run.model.layers)
    for declaration in declarations(run.model):
        yield declaration.name, source(declaration, declaration.box())


def give_weights(run: Run, model: nn.Module) -> None:
    """Start a module that uses our names from the same weights."""
    own = model.state_dict()
    for name, value in initial_weights(run):
        own[name].copy_(value)
