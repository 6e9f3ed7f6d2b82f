"""Both ends of the model: tokens to activations, and activations to a loss."""

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.layout import share
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.train.loss import Slice, token_losses
from phalanx.train.model.batch import MicroBatch
from phalanx.train.model.layers import Dropout, norm_layer
from phalanx.train.parallel.tensor import TensorParallel
from phalanx.train.parameters import Declared
from phalanx.train.precision.product import PLAIN, Product


class Table(Declared):
    """One row of h numbers for each token id; this rank holds V/t rows.

    Attributes:
        first: the first id that this rank holds.
    """

    weight: nn.Parameter

    def __init__(self, name: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__(name)
        self.declare("weight", (shape.vocab, shape.hidden), split=0)
        self.bias: nn.Parameter | None = None
        self.product: Product = PLAIN  # few bits hold no vocabulary
        self.first, self.rows = share(shape.vocab, tp.group.size, tp.group.index)


class PositionTable(Declared):
    """One learned row for each position."""

    weight: nn.Parameter

    def __init__(self, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__("positions")
        size = (shape.max_positions, shape.hidden)
        self.declare("weight", size, partial=tp.sequence)


class Embedding(nn.Module):
    """Looks up tokens, each rank its own part of the vocabulary, and adds positions."""

    def __init__(self, shape: ModelShape, recipe: Recipe, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.table = Table("embedding", shape, tp)
        self.positions = PositionTable(shape, tp) if shape.positions == "learned" else None
        self.drop = Dropout(recipe.dropout, recipe.seed, "embedding", tp)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Tokens [s, b] to activations [s/t, b, h]."""
        x = self.tp.sum(self._my_rows(batch.tokens))
        if self.positions is not None:
            x = x + F.embedding(self.tp.my_sequence(batch.positions), self.positions.weight)
        return self.drop(x, batch)

    def _my_rows(self, tokens: Tensor) -> Tensor:
        if self.tp.group.size == 1:
            return F.embedding(tokens, self.table.weight)
        local = tokens - self.table.first
        mine = (local >= 0) & (local < self.table.rows)
        rows = F.embedding(local.where(mine, 0), self.table.weight)
        return rows * mine.unsqueeze(-1)


class Head(nn.Module):
    """The final norm, the projection to the vocabulary, and the loss."""

    def __init__(
        self, shape: ModelShape, recipe: Recipe, tp: TensorParallel, tied: Table | None
    ) -> None:
        super().__init__()
        self.tp = tp
        self.norm = norm_layer("norm", shape, tp)
        name = "embedding" if shape.tied else "head"
        self.table = tied or Table(name, shape, tp)
        self.part = Slice(self.table.first, shape.vocab, recipe.label_smoothing, tp.group)

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """Sum of the losses of all valid tokens: [s/t, b, h] to a scalar, fp32 or wider."""
        return token_losses(self.logits(x), batch.targets, self.part).sum()

    def logits(self, x: Tensor) -> Tensor:
        """This rank's part of the vocabulary: [s/t, b, h] to [s, b, V/t]."""
        (logits,) = self.tp.columns(self.norm(x), self.table)
        return logits
