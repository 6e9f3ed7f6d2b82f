"""A row of token ids that may lie in several files: one after the other, none of them read."""

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]


class TokenRow:
    """Pieces of a row, used as if they were one array.

    Example:
        >>> row = TokenRow((np.array([1, 2, 3]), np.array([4, 5])))
        >>> len(row), row[2:4].tolist(), row[-1:].tolist()
        (5, [3, 4], [5])

    Attributes:
        dtype: of an id.
    """

    def __init__(self, pieces: tuple[Ids, ...], dtype: np.dtype[Any] | None = None) -> None:
        """Lay pieces side by side.

        Args:
            pieces: one-dimensional, of one dtype.
            dtype: theirs, where there may be none.
        """
        self._pieces = pieces
        self._starts = np.cumsum([0, *(len(piece) for piece in pieces)])
        self.dtype: np.dtype[Any] = dtype or pieces[0].dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, where: slice) -> Ids:
        """Some ids in a row; a copy where they lie in several pieces."""
        start, stop, _ = where.indices(len(self))
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        found = []
        while start < stop:
            piece, offset = self._pieces[first], int(self._starts[first])
            end = min(stop, offset + len(piece))
            found.append(piece[start - offset : end - offset])
            start, first = end, first + 1
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, self.dtype)

    def tail(self, start: int, stop: int) -> "TokenRow":
        """The ids from `start` to `stop` as a row of their own, still in their files.

        Args:
            start: of the first.
            stop: after the last.
        """
        kept = []
        for piece, offset in zip(self._pieces, self._starts, strict=False):
            low, high = max(start - offset, 0), min(stop - offset, len(piece))
            if low < high:
                kept.append(piece[low:high])
        return TokenRow(tuple(kept), self.dtype)


def windows_at(tokens: Ids | TokenRow, starts: NDArray[np.int64], length: int) -> Ids:
    """Ids in windows: [n, length].

    Args:
        tokens: the row.
        starts: int64 [n], of each window.
        length: of all windows.
    """
    if isinstance(tokens, TokenRow):
        return np.stack([tokens[start : start + length] for start in starts.tolist()])
    return sliding_window_view(tokens, length)[starts]
