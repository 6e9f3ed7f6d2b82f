"""Which tokens a step learns from: a pure function of (seed, step, position in the global batch).

No rank keeps a place in the text. Whoever holds position 5 of step 120 computes the same window,
under any layout, any micro-batch size and after any resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, UsageError
from phalanx.data.corpus import Corpus
from phalanx.data.shuffle import fold, permute
from phalanx.data.skips import Skips

Int64 = NDArray[np.int64]

IGNORED = -100  # a target that no loss counts; the default of torch's cross entropy


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Some sequences of one global batch: n rows of s tokens.

    Attributes:
        tokens: int64 [n, s], what the model reads.
        targets: int64 [n, s], the token that follows each; IGNORED where nothing is to be learned.
        positions: int64 [n, s], place of each token in its document, from 0.
        documents: int32 [n, s], which document of its row a token belongs to, from 0, rising; None
            when tokens attend across documents.
    """

    tokens: Int64
    targets: Int64
    positions: Int64
    documents: NDArray[np.int32] | None


class Stream(Protocol):
    """Anything that knows the sequences of every step."""

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Return the sequences at these places of the global batch of `step`, row for row.

        Args:
            step: of the optimizer, from 0.
            positions: places in the global batch.
        """
        ...


class SampleStream:
    """Windows of a corpus, shuffled anew every epoch.

    Window w is tokens w s .. w s + s: one more than the model reads, so that in an epoch every
    token but the first is a target once (a rest shorter than a window is left out).

    Attributes:
        skips: batches that are left out; none at first.
    """

    def __init__(
        self, corpus: Corpus, *, seq: int, batch: int, seed: int, document_mask: bool = False
    ) -> None:
        """Cut a corpus into windows.

        Args:
            corpus: what to read.
            seq: s, tokens per sequence.
            batch: sequences per step, over all ranks.
            seed: of the order.
            document_mask: keep the documents of a window apart.

        Raises:
            DataError: the corpus is shorter than one window.
            UsageError: documents are to be kept apart and nothing says where they end.
        """
        if len(corpus) < 2:
            raise DataError(
                f"{corpus.name} has {len(corpus)} token to learn from, and learning needs at least "
                "2: one to read and one to predict; give a longer text"
            )
        if len(corpus) <= seq:
            raise DataError(
                f"{corpus.name} has {len(corpus):,} tokens to learn from, and recipe.seq={seq} "
                f"needs {seq + 1:,}; give a longer text, or recipe.seq of at most "
                f"{len(corpus) - 1}"
            )
        if document_mask and corpus.separator is None:
            raise UsageError(
                f"data.document_mask is true, but nothing says which id ends a document of "
                f"{corpus.name}; set data.separator, or data.document_mask = false"
            )
        self.corpus = corpus
        self.seq = seq
        self.batch_size = batch
        self.seed = seed
        self.skips = Skips()
        self._separator = corpus.separator if document_mask else None
        self._num_windows = (len(corpus) - 1) // seq

    @property
    def num_windows(self) -> int:
        """Sequences in one epoch."""
        return self._num_windows

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Return the sequences at these places of the global batch of `step`, row for row.

        Args:
            step: counted from 0.
            positions: each in [0, batch).

        Raises:
            DataError: a token id lies outside the model's vocabulary, or the file of the tokens
                was cut short.
        """
        starts = self.windows(step, positions) * self.seq
        batch = cut(self.corpus.windows(starts, self.seq + 1), self._separator)
        learned = self.corpus.learned(starts, self.seq + 1)
        if learned is None:
            return batch
        return replace(batch, targets=np.where(learned[:, 1:], batch.targets, IGNORED))

    def windows(self, step: int, positions: Sequence[int]) -> Int64:
        """Return which window of the corpus each place of the global batch of `step` reads.

        Samples are numbered through all steps. The n-th of an epoch is the n-th window in that
        epoch's permutation, so a batch may end one epoch and begin the next.

        Args:
            step: of the optimizer, from 0.
            positions: places in the global batch.

        Returns:
            int64 [n], each in [0, num_windows).
        """
        place = np.asarray(positions, dtype=np.int64)
        assert ((place >= 0) & (place < self.batch_size)).all(), f"{place} of {self.batch_size}"
        first = self.skips.batch_of(step) * self.batch_size
        epoch, index = np.divmod(first + place, self.num_windows)
        return permute(index, self.num_windows, fold(self.seed, epoch))

    def tokens_seen(self, step: int) -> int:
        """Tokens read before `step`, over all ranks."""
        return step * self.batch_size * self.seq

    def epoch(self, step: int) -> float:
        """How far into the corpus `step` begins, in whole readings of it."""
        return self.skips.batch_of(step) * self.batch_size / self.num_windows


class HeldOutStream:
    """The same few windows at every validation, drawn from all over the corpus, none twice.

    The last batch may have places left over; their targets count in no loss.
    """

    def __init__(self, samples: SampleStream, batches: int) -> None:
        """Take the first batches of a stream, as far as its corpus reaches.

        Args:
            samples: of the held-out corpus.
            batches: how many at most.
        """
        self.samples = samples
        self.num_batches = min(batches, -(-samples.num_windows // samples.batch_size))

    def batch(self, step: int, positions: Sequence[int]) -> Batch:
        """Return the sequences at these places of batch `step`, row for row.

        Args:
            step: in [0, num_batches).
            positions: each in [0, batch).

        Raises:
            DataError: as of `SampleStream.batch`.
        """
        batch = self.samples.batch(step, positions)
        place = step * self.samples.batch_size + np.asarray(positions, dtype=np.int64)
        again = (place >= self.samples.num_windows)[:, None]
        return replace(batch, targets=np.where(again, IGNORED, batch.targets))


def cut(windows: NDArray[np.integer[Any]], separator: int | None) -> Batch:
    """Turn windows into what is read and what is to be predicted.

    A separator is the last token of its document. It has no target: the next token belongs to
    another document. So a document in a packed window teaches exactly what it would alone.

    Args:
        windows: token ids [n, s + 1].
        separator: the id that ends a document; None lets tokens attend across documents.

    Example:
        >>> batch = cut(np.array([[5, 6, 0, 7, 8]]), separator=0)
        >>> batch.tokens.tolist(), batch.targets.tolist(), batch.documents.tolist()
        ([[5, 6, 0, 7]], [[6, 0, -100, 8]], [[0, 0, 0, 1]])
    """
    ids = windows.astype(np.int64)
    tokens, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    place = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    if separator is None:
        return Batch(tokens=tokens, targets=targets, positions=place.copy(), documents=None)
    last = tokens == separator
    first = np.roll(last, 1, axis=1)
    first[:, 0] = True
    start = np.maximum.accumulate(np.where(first, place, 0), axis=1)
    return Batch(
        tokens=tokens,
        targets=np.where(last, IGNORED, targets),
        positions=place - start,
        documents=np.cumsum(first, axis=1, dtype=np.int32) - np.int32(1),
    )
