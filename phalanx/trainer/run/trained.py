"""A model that was trained: a run, one of its checkpoints, or a folder that Transformers loads.

Whatever uses one (writes text, measures it, exports it) finds it here: its shape, its weights under
any layout, and the tokenizer that it reads with.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.run import Recipe, Run
from phalanx.data.shards import TOKENIZER, is_tokens, read_index
from phalanx.data.tokenizers import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from phalanx.trainer.checkpoint import Checkpoint
    from phalanx.trainer.engine.engine import Engine
    from phalanx.trainer.engine.unit import Source
    from phalanx.trainer.run.worker import Worker

CONFIG = "config.json"
WHAT = "a run such as runs/NAME, one of its checkpoints, or a folder that Transformers loads"
_LEAST_SEQ = 32


@dataclass(frozen=True)
class Trained:
    """Where a trained model lies.

    Attributes:
        run: that trained it; of a folder of weights, one that would start from it.
        checkpoint: its weights; None of a folder.
        folder: of a checkpoint's run, or of the weights.
    """

    run: Run
    checkpoint: Path | None
    folder: Path

    @property
    def name(self) -> str:
        """What to call it on a screen."""
        if self.checkpoint is None:
            return str(self.folder)
        return f"{self.folder.name}, {self.checkpoint.name}"

    def tokenizer(self, said: str = "") -> Tokenizer | None:
        """What it reads with: the tokenizer of its folder, or of the shards that it learned from.

        Args:
            said: a tokenizer to use instead; empty for the model's own.

        Raises:
            UsageError: there is none at `said`.
            PhalanxError: the library that reads it is missing.
        """
        if said:
            return open_tokenizer(said)
        home = tokenizer_home(self.run) if self.checkpoint is not None else self.folder
        if home is None:
            return open_tokenizer("bytes") if reads_bytes(self.run) else None
        try:
            return open_tokenizer(home)
        except UsageError:
            return None


def tokenizer_home(run: Run) -> Path | None:
    """The folder with the tokenizer of what a run reads; None where there is none."""
    shards = Path(run.data.path)
    if run.data.path and (shards / TOKENIZER).is_dir():
        return shards / TOKENIZER
    return Path(run.weights) if run.weights and Path(run.weights).is_dir() else None


def reads_bytes(run: Run) -> bool:
    """Whether the ids of what a run reads are bytes of text."""
    path = Path(run.data.path)
    if run.data.path and is_tokens(path):
        return read_index(path).tokenizer == "bytes"
    return path.suffix.lower() not in (".npy", ".bin", ".ds") or not run.data.path


def find_trained(path: Path, load: Callable[[Path], Run]) -> Trained:
    """Find a trained model.

    Args:
        path: of a run, of one of its checkpoints, or of a folder of weights.
        load: reads a run file.

    Raises:
        UsageError: it is none of them, or the run has no checkpoint yet.
        CheckpointError: the checkpoint cannot be trusted.
    """
    if (path / CONFIG).is_file():
        from phalanx.trainer.model.huggingface import import_hf

        shape, _ = import_hf(path)
        return Trained(Run(model=shape, weights=str(path.resolve())), None, path)
    for home in (path, path.absolute().parent.parent):
        if (home / "run.toml").is_file():
            with open_checkpoint(path) as checkpoint:
                return Trained(load(home / "run.toml"), checkpoint.path, home)
    raise UsageError(f"{path} is no trained model; give {WHAT}")


@contextmanager
def open_checkpoint(source: Path) -> Iterator["Checkpoint"]:
    """The newest checkpoint of a run that can be trusted, or the one that is named.

    Raises:
        UsageError: the run has none yet.
        CheckpointError: it cannot be trusted.
    """
    from phalanx.trainer.checkpoint import newest, open_verified

    found = (
        newest(source / "checkpoints", lambda event: print(event, file=sys.stderr))  # noqa: T201
        if (source / "run.toml").is_file()
        else open_verified(source)
    )
    if found is None:
        raise UsageError(f"{source} has no checkpoint yet; set recipe.checkpoint_every, or wait")
    with found:
        yield found


def as_used(trained: Trained, layout: Layout, seq: int, batch: int) -> Run:
    """A run that only uses a model: nothing is learned, so nothing is kept for it.

    Args:
        trained: the model.
        layout: how it is cut.
        seq: tokens of the longest text; a table of positions may allow fewer.
        batch: texts at once.
    """
    shape = trained.run.model
    seq = max(seq, _LEAST_SEQ)
    if shape.positions == "learned":
        seq = min(seq, shape.max_positions)
    recipe = Recipe(seq=seq, batch=batch, seed=trained.run.recipe.seed, optimizer="sgd")
    return Run(model=shape, layout=layout, recipe=recipe, weights=trained.run.weights)


def build_trained(worker: "Worker", trained: Trained, run: Run) -> "Engine":
    """This rank's part of a trained model.

    Args:
        worker: this process, joined with the others.
        trained: where its weights are.
        run: from `as_used`.

    Raises:
        PhalanxError: the layout needs another number of ranks, or cannot cut this model.
        CheckpointError: weights are missing, or of another shape.
    """
    from phalanx.trainer.engine.engine import build_engine
    from phalanx.trainer.model.init import init_source
    from phalanx.trainer.parallel.mesh import build_mesh
    from phalanx.trainer.precision.dtypes import Dtypes
    from phalanx.trainer.run.limits import refuse_untrainable

    precision = Dtypes.named(run.layout.precision, worker.device)
    run = replace(run, layout=replace(run.layout, precision=precision.precision))
    refuse_untrainable(run)
    mesh = build_mesh(run.layout, worker.device, kv_heads=run.model.kv_heads)
    source = init_source(run) if trained.checkpoint is None else _of_checkpoint(trained.checkpoint)
    engine = build_engine(run, mesh, source)
    if trained.checkpoint is not None:
        _restore_biases(engine, trained.checkpoint)
    return engine


def _of_checkpoint(path: Path) -> "Source":
    """Reads any box of any parameter of a checkpoint."""
    import torch

    from phalanx.trainer.checkpoint import Checkpoint
    from phalanx.trainer.model.parameters import Box, Declaration

    checkpoint = Checkpoint.open(path)

    def values(declaration: Declaration, box: Box) -> torch.Tensor:
        whole = checkpoint.tensor(declaration.name)
        cut = tuple(slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True))
        return whole[cut].float() if whole.dtype != torch.float64 else whole[cut]

    return values


def _restore_biases(engine: "Engine", path: Path) -> None:
    """What evens out the load of experts decides who is asked, also when nothing is learned."""
    from phalanx.trainer.checkpoint import Checkpoint

    with Checkpoint.open(path) as checkpoint:
        for router in engine.balancer.routers:
            router.bias.copy_(checkpoint.tensor(f"{router.prefix}.bias"))
