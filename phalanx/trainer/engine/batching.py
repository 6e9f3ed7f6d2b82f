"""From a batch of sequences to the micro-batches of one rank, and how many tokens count."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.batches import Batch
from phalanx.trainer.engine.engine import Engine
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.loss import IGNORED


def micro_batches(
    engine: Engine, step: int, batch: Batch, places: range | None = None
) -> list[MicroBatch]:
    """Cut this rank's part of its sequences into micro-batches.

    Sequences are padded so that cp and tp can cut them: at the end, where no token looks at the
    padding, and it counts in no loss.

    Args:
        engine: of this rank.
        step: from 0; dropout depends on it.
        batch: the sequences at these places.
        places: in the global batch; None means `engine.positions()`.
    """
    run, device, context = engine.run, engine.mesh.device, engine.context
    pad = run.layout.padded_seq(run.recipe.seq) - run.recipe.seq

    def sequence_first(values: NDArray[np.int64], fill: int) -> Tensor:
        whole = F.pad(torch.from_numpy(values), (0, pad), value=fill).t()
        return context.my_part(whole).contiguous().to(device)

    tokens = sequence_first(batch.tokens, 0)
    targets = sequence_first(batch.targets, IGNORED)
    positions = sequence_first(batch.positions, 0)
    documents = None
    if batch.documents is not None:
        documents = F.pad(torch.from_numpy(batch.documents), (0, pad), value=-1).to(device)
    samples = torch.tensor(places or engine.positions(), device=device)
    size = run.layout.mb
    return [
        MicroBatch(
            tokens=tokens[:, i : i + size],
            targets=targets[:, i : i + size],
            positions=positions[:, i : i + size],
            documents=None if documents is None else documents[i : i + size],
            samples=samples[i : i + size],
            seq=run.recipe.seq,
            step=step,
            loss_scale=engine.loss_scale.value,
            context=context,
        )
        for i in range(0, len(samples), size)
    ]


def count_targets(engine: Engine, batches: Sequence[MicroBatch], *, each: bool = False) -> Tensor:
    """How many predictions of the global batch count.

    Args:
        engine: of this rank.
        batches: its micro-batches.
        each: count those of each micro-batch by themselves.

    Returns:
        A whole number, or [m] of them.
    """
    counts = torch.stack([(b.targets != IGNORED).sum() for b in batches])
    total = counts if each else counts.sum()
    engine.mesh.data.all_reduce(total, "valid tokens").wait()
    return total


def count_valid(engine: Engine, batches: Sequence[MicroBatch], *, each: bool = False) -> Tensor:
    """As `count_targets`, but at least 1, and in the dtype of the loss: what a mean divides by.

    Args:
        engine: of this rank.
        batches: its micro-batches.
        each: count those of each micro-batch by themselves.

    Returns:
        A number, or [m]; float64 where activations are, else float32.
    """
    wide = torch.float64 if engine.executor.wire.form.dtype == torch.float64 else torch.float32
    return count_targets(engine, batches, each=each).clamp(min=1).to(wide)
