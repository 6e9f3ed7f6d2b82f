"""Made-up batches that are hard on purpose: what the oracle feeds to two layouts to compare them.

The places without a target are laid so that ranks and micro-batches hold very different numbers of
valid tokens, however the global batch is cut: a mean of means then differs from the mean.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UsageError, unknown
from phalanx.data.batches import IGNORED, Batch, cut
from phalanx.data.shuffle import fold

Masked = Literal["none", "uneven", "holes"]

SEPARATOR = 0
# Valid eighths of a sequence, by position modulo 8. Every way to deal eight positions to 2, 4 or 8
# ranks, in blocks or in turn, gives the ranks different sums; one sequence has no target at all.
VALID_EIGHTHS = (6, 2, 7, 0, 1, 3, 1, 2)


class SyntheticStream:
    """Random tokens for every (seed, step, position).

    masked says which targets are missing:
        none: no target.
        uneven: the end of each sequence, from a quarter to all of it, by position.
        holes: about half the tokens, here and there, of positions 0, 2, 4, ... of the first half
            of the batch, and every target of the others: with dp >= 2 some rank has none, whether
            positions are dealt in blocks or in turn.
    """

    def __init__(
        self,
        vocab: int,
        seq: int,
        batch: int,
        seed: int,
        masked: Masked = "none",
        documents: bool = False,
    ) -> None:
        """Describe the stream.

        Args:
            vocab: ids are drawn from [0, vocab).
            seq: s, tokens per sequence.
            batch: sequences per step, over all ranks.
            seed: of the tokens.
            masked: which targets are missing.
            documents: pack several documents into a sequence, each ended by SEPARATOR.

        Raises:
            UsageError: an unknown `masked`, or a vocabulary without room for documents.
        """
        if masked not in get_args(Masked):
            raise unknown("mask", masked, get_args(Masked))
        if documents and vocab < 2:
            raise UsageError(f"documents need an id beside the separator; vocab={vocab}, not >= 2")
        self.vocab = vocab
        self.seq = seq
        self.batch_size = batch
        self.seed = seed
        self.masked = masked
        self.documents = documents

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Return the sequences at these places of the global batch of `step`, row for row.

        Args:
            step: counted from 0.
            positions: each in [0, batch).
        """
        place = np.asarray(positions, dtype=np.int64)[:, None]
        assert ((place >= 0) & (place < self.batch_size)).all(), f"{place} of {self.batch_size}"
        batch = cut(self._windows(step, place), SEPARATOR if self.documents else None)
        valid = self._valid(step, place)
        return replace(batch, targets=np.where(valid, batch.targets, IGNORED))

    def _windows(self, step: int, place: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids [n, s + 1]; with documents, about one in eight is a separator."""
        column = np.arange(self.seq + 1)
        words = fold(self.seed, step, place, column)
        if not self.documents:
            return (words % np.uint64(self.vocab)).astype(np.int64)
        ids = 1 + (words % np.uint64(self.vocab - 1)).astype(np.int64)
        ends = words >> np.uint64(61) == 0
        return np.where(ends | (column == self.seq // 2), SEPARATOR, ids)

    def _valid(self, step: int, place: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which targets [n, s] are kept; position 0 always keeps its first."""
        column = np.arange(self.seq)
        valid = np.ones((len(place), self.seq), dtype=np.bool_)
        match self.masked:
            case "uneven":
                valid &= column * 8 < np.array(VALID_EIGHTHS)[place % 8] * self.seq
            case "holes":
                valid &= fold(self.seed, step, place, column) % np.uint64(2) == 0
                valid[:, 0] = True
                valid &= (place % 2 == 0) & (place * 2 < self.batch_size)
        return valid
