"""Both ends of the model: tokens to activations, and activations to a loss."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.layout import share
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe
from phalanx.trainer.engine.weight_gradients import WeightGradients
from phalanx.trainer.model.batch import MicroBatch
from phalanx.trainer.model.layers import Dropout, norm_layer
from phalanx.trainer.model.loss import ChunkedLoss, VocabSlice, token_losses
from phalanx.trainer.model.parameters import Declared
from phalanx.trainer.ops.autograd import apply
from phalanx.trainer.parallel.tensor import TensorParallel
from phalanx.trainer.precision.product import PLAIN, Multiplier


class EmbeddingTable(Declared):
    """One row of h numbers for each token id; this rank holds V/t rows.

    Attributes:
        first: the first id that this rank holds.
    """

    weight: nn.Parameter

    def __init__(self, name: str, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__(name)
        self.declare("weight", (shape.vocab, shape.hidden), tp_dim=0)
        self.bias: nn.Parameter | None = None
        self.product: Multiplier = PLAIN  # low precision holds no vocabulary
        self.first, self.rows = share(shape.vocab, tp.group.size, tp.group.index)


class PositionTable(Declared):
    """One learned row for each position."""

    weight: nn.Parameter

    def __init__(self, shape: ModelShape, tp: TensorParallel) -> None:
        super().__init__("positions")
        size = (shape.max_positions, shape.hidden)
        self.declare("weight", size, needs_tp_reduce=tp.sequence)


class Embedding(nn.Module):
    """Looks up tokens, each rank its own part of the vocabulary, and adds positions."""

    def __init__(self, shape: ModelShape, recipe: Recipe, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.scale = tp, shape.embedding_scale
        self.table = EmbeddingTable("embedding", shape, tp)
        self.positions = PositionTable(shape, tp) if shape.positions == "learned" else None
        self.drop = Dropout(recipe.dropout, recipe.seed, "embedding", tp)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Tokens [s, b] to activations [s/t, b, h]."""
        x = self.tp.sum(self._my_rows(batch.tokens))
        if self.scale:
            x = x * self.scale
        if self.positions is not None:
            x = x + self._look_up(self.tp.my_sequence(batch.positions), self.positions.weight)
        return self.drop(x, batch)

    def _my_rows(self, tokens: Tensor) -> Tensor:
        if self.tp.group.size == 1:
            return self._look_up(tokens, self.table.weight)
        local = tokens - self.table.first
        mine = (local >= 0) & (local < self.table.rows)
        rows = self._look_up(local.where(mine, 0), self.table.weight)
        return rows * mine.unsqueeze(-1)

    def _look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        return cast(Tensor, apply(_Lookup, self.tp.gradients, ids, table))


class _Lookup(torch.autograd.Function):
    """Rows of a table; its backward adds each row's gradient up."""

    @staticmethod
    def forward(ctx: Any, gradients: WeightGradients, ids: Tensor, table: Tensor) -> Tensor:
        ctx.gradients, ctx.parameter = gradients, table
        ctx.save_for_backward(ids)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = cast(tuple[Tensor], ctx.saved_tensors)
        return None, None, *ctx.gradients.finish(_LookupWork(ctx.parameter, ids, grads[0]))


class _LookupWork:
    """The gradient of a table: each token's gradient, added to the row that it took."""

    def __init__(self, table: Tensor, ids: Tensor, grad: Tensor) -> None:
        self.weights, self.ids, self.grad = (table,), ids, grad

    def start(self) -> None:
        """Send nothing: all is here."""

    def finish(self) -> tuple[Tensor, ...]:
        rows = self.weights[0].shape[0]
        whole = torch.ops.aten.embedding_dense_backward(self.grad, self.ids, rows, -1, False)
        return (cast(Tensor, whole),)


class Head(nn.Module):
    """The final norm, the projection to the vocabulary, and the loss."""

    def __init__(
        self,
        shape: ModelShape,
        recipe: Recipe,
        tp: TensorParallel,
        tied: EmbeddingTable | None,
        chunk: int = 0,
    ) -> None:
        """Declare the norm and the table.

        Args:
            shape: the model.
            recipe: for label smoothing.
            tp: how this rank takes part in products.
            tied: the embedding's table, where this head shares it.
            chunk: tokens whose logits are alive at once; 0 means all, from forward to backward.
        """
        super().__init__()
        self.tp, self.chunk, self.cap = tp, chunk, shape.logit_cap
        self.norm = norm_layer("norm", shape, tp)
        name = "embedding" if shape.tied else "head"
        self.table = tied or EmbeddingTable(name, shape, tp)
        self.part = VocabSlice(self.table.first, shape.vocab, recipe.label_smoothing, tp.group)

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """Sum of the losses of all valid tokens: [s/t, b, h] to a scalar, fp32 or wider.

        Targets are smoothed only where something is learned.

        Args:
            x: the last block's output, in the dtype of computation.
            batch: gives the targets; -100 is not counted.
        """
        part = self.part if torch.is_grad_enabled() else self.part._replace(smoothing=0.0)
        if self.chunk:
            loss = ChunkedLoss(self.tp, part, self.chunk)
            return loss.sum(self.norm(x), self.table.weight, batch.targets)
        return token_losses(self.logits(x), batch.targets, part).sum()

    def logits(self, x: Tensor) -> Tensor:
        """This rank's part of the vocabulary: [s/t, b, h] to [s, b, V/t]."""
        (logits,) = self.tp.columns(self.norm(x), self.table)
        return self.cap * (logits / self.cap).tanh() if self.cap else logits
