"""What a model learns from: one long row of token ids, wherever it came from.

Text is read as bytes, one token each, and a zero byte ends a document. Token files are mapped, not
read: only the pages that a batch touches come into memory.
"""

import hashlib
import math
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, UsageError
from phalanx.core.run import Data
from phalanx.data.kinds import refuse_binary
from phalanx.data.mapped import MappedFile
from phalanx.data.raw import Packing, packing_of
from phalanx.data.row import TokenRow, windows_at
from phalanx.data.shards import document_ends, is_tokens, map_shards, read_index
from phalanx.data.text import PACKED, RECORDS, SOURCES, TOKENS, read_folder, read_library

Tokens = NDArray[np.integer[Any]]

TEXT_SEPARATOR = 0
NUM_BYTES = 256
SCAN_CHUNK = 1 << 22  # tokens
SCAN_CHUNKS = 16  # a longer file is sampled at opening; every batch is checked anyway


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A row of token ids, whole or cut from a longer one.

    Attributes:
        name: what to call it on a screen; says how many files it was read from.
        tokens: integers, one-dimensional; perhaps a memory-mapped file.
        separator: the id that ends a document; None when nobody said which.
        bytes_per_token: 1.0 for text read as bytes; nan when unknown.
        vocab: ids of the model; every token must be below it.
        offset: where `tokens` starts in the whole corpus.
        files: that `tokens` is mapped from; none where they are in memory.
        learn: uint8 like `tokens`, 1 where a token is to be learned; None where all are.
        folder: of token shards; None where it is none.
        largest: the largest id, where an index says it; -1 where nothing does.
    """

    name: str
    tokens: Tokens | TokenRow
    separator: int | None
    bytes_per_token: float
    vocab: int
    offset: int = 0
    files: tuple[MappedFile, ...] = ()
    learn: TokenRow | None = None
    folder: Path | None = None
    largest: int = -1

    @property
    def token_dtype(self) -> str:
        """Of the ids as they lie in the file."""
        return self.tokens.dtype.name

    @property
    def is_text(self) -> bool:
        """Whether its tokens are the bytes of a text that was not tokenized."""
        return self.bytes_per_token == 1.0 and self.folder is None

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, share: float, seq: int = 1) -> tuple["Corpus", "Corpus | None"]:
        """Hold out the last `share` of the tokens.

        Args:
            share: of the tokens, in [0, 1).
            seq: tokens per sequence; a tail that cannot fill one is not held out.

        Returns:
            What to train on, and what to validate on (None when that would be nothing).
        """
        held_out = int(len(self) * share)
        if held_out <= seq:
            return self, None
        cut = len(self) - held_out
        return self._between(0, cut), self._between(cut, len(self))

    def _between(self, start: int, stop: int) -> "Corpus":
        tokens, learn = self.tokens, self.learn
        return replace(
            self,
            tokens=tokens.tail(start, stop) if isinstance(tokens, TokenRow) else tokens[start:stop],
            learn=learn.tail(start, stop) if learn is not None else None,
            offset=self.offset + start,
        )

    def windows(self, starts: NDArray[np.int64], length: int) -> Tokens:
        """Token ids [n, length] from each of `starts` on, all of them known to the model.

        Args:
            starts: int64 [n], places in `tokens`.
            length: of each window.

        Raises:
            DataError: an id lies outside the model's vocabulary, or a file was cut short.
        """
        self.require_whole()
        found = windows_at(self.tokens, starts, length)
        self.require_known(found, starts)
        return found

    def learned(self, starts: NDArray[np.int64], length: int) -> NDArray[np.bool_] | None:
        """Which tokens of some windows are to be learned, [n, length]; None where all are.

        Args:
            starts: int64 [n], places in `tokens`.
            length: of each window.
        """
        return None if self.learn is None else windows_at(self.learn, starts, length) > 0

    def document_ends(self) -> NDArray[np.int64]:
        """Where each document ends in `tokens`, int64, rising; the last ends where they do.

        Read from the index of shards; elsewhere looked for, in all of the tokens.
        """
        if self.folder is not None:
            ends = document_ends(self.folder, read_index(self.folder)) - self.offset
            ends = ends[(ends > 0) & (ends < len(self))]
        elif self.separator is None:
            ends = np.empty(0, np.int64)
        else:
            found = [
                np.nonzero(self.tokens[at : at + SCAN_CHUNK] == self.separator)[0] + at + 1
                for at in range(0, len(self), SCAN_CHUNK)
            ]
            ends = np.concatenate(found)
        return np.unique(np.append(ends, len(self)))

    def require_whole(self) -> None:
        """Stop if the file of the tokens was cut short, before a token that is gone is read.

        Raises:
            DataError: naming the file.
        """
        for file in self.files:
            file.require_whole()

    def require_known(self, windows: Tokens, starts: NDArray[np.int64]) -> None:
        """Stop at a token that the model has no row for.

        Args:
            windows: token ids [n, length].
            starts: int64 [n], where each window starts in `tokens`.

        Raises:
            DataError: an id lies outside [0, vocab).
        """
        if self.always_known or (windows.min() >= 0 and windows.max() < self.vocab):
            return
        row, column = np.argwhere((windows < 0) | (windows >= self.vocab))[0]
        where = f"token {self.offset + int(starts[row]) + int(column):,} of {self.name}"
        found, largest = int(windows[row, column]), int(windows.max())
        if found < 0:
            raise DataError(f"{where} is {found}; ids lie in 0..{self.vocab - 1} (model.vocab)")
        raise DataError(
            f"{where} is {found}, beyond model.vocab={self.vocab}: set model.vocab to at least "
            f"{largest + 1}, or tokenize with a vocabulary of {self.vocab}"
        )

    @property
    def always_known(self) -> bool:
        """Whether the type of the tokens, or their index, keeps every id below `vocab`."""
        limits = np.iinfo(self.tokens.dtype)
        return bool(limits.min == 0 and limits.max < self.vocab) or 0 <= self.largest < self.vocab

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ for another text: to see that a resumed run reads the same.

        Covers the length and 64 evenly spaced blocks of 4,096 tokens, so that it is quick for any
        size; a change between the blocks that keeps the length goes unseen.
        """
        digest = hashlib.blake2b(str(len(self)).encode(), digest_size=8)
        for start in np.linspace(0, max(len(self) - 4096, 0), 64, dtype=np.int64):
            digest.update(self.tokens[start : start + 4096].astype("<i8").tobytes())
        return digest.hexdigest()


def open_corpus(data: Data, vocab: int) -> Corpus:
    """Open what `data.path` names: a text, a folder of texts, or a token file.

    Args:
        data: the `[data]` table of the run.
        vocab: ids of the model.

    Raises:
        DataError: it cannot be read, is empty, or holds ids that the model does not know.
        UsageError: `data.separator` does not fit this corpus.
    """
    path = Path(data.path).expanduser()
    try:
        empty = path.suffix != ".npy" and path.is_file() and not path.stat().st_size
        corpus = None if empty else _open(path, data, vocab)
    except OSError as error:
        reason = f"{error.filename or path}: {error.strerror or error}"
        raise DataError(f"cannot read {reason}; data.path can be {SOURCES}") from error
    if not corpus:  # of length zero, or none at all
        name = path.name if corpus is None else corpus.name
        raise DataError(f"{name} is empty; data.path can be {SOURCES}")
    return corpus


def _open(path: Path, data: Data, vocab: int) -> Corpus:
    if data.path and not path.exists():
        raise UsageError(f"data.path {data.path!r} does not exist; it can be {SOURCES}")
    if path.is_file() and path.suffix.lower() in TOKENS:
        return _open_tokens(path, data, vocab)
    if data.path and is_tokens(path):
        return _open_shards(path, data, vocab)
    if data.separator >= 0:
        raise UsageError(
            f"data.separator is {data.separator}, but a text ends its documents with a zero byte; "
            "leave it out, or give a token file (.npy, .bin)"
        )
    name, text = _read_text(path, trust=data.trust) if data.path else _read_library()
    if vocab < NUM_BYTES:
        raise DataError(
            f"{name} is read as bytes, which needs {NUM_BYTES} ids, and model.vocab is {vocab}; "
            f"set model.vocab to at least {NUM_BYTES}, or give a token file (.npy, .bin)"
        )
    return Corpus(
        name=name,
        tokens=text,
        separator=TEXT_SEPARATOR,
        bytes_per_token=1.0,
        vocab=vocab,
        files=(MappedFile.of(path),) if path.is_file() else (),
    )


def _read_library() -> tuple[str, Tokens]:
    folder = read_library()
    version = platform.python_version()
    return f"Python {version} standard library, {_count(folder.num_files, 'file')}", folder.text


def _read_text(path: Path, *, trust: bool) -> tuple[str, Tokens]:
    if path.is_dir():
        folder = read_folder(path)
        skipped = f" ({folder.left_out} skipped)" if folder.left_out else ""
        name = path.resolve().name or str(path)
        return f"{name}, {_count(folder.num_files, 'text file')}{skipped}", folder.text
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder; data.path can be {SOURCES}")
    suffix = path.suffix.lower()
    if suffix in PACKED:
        raise DataError(
            f"{path.name} is not plain text; unpack it, or phalanx data tokenize {path.name} "
            f"-o tokens: data.path can be {SOURCES}"
        )
    if suffix in RECORDS and not trust:
        raise DataError(
            f"{path.name} holds records, and a run reads plain text or token ids: make them with "
            f"phalanx data tokenize {path.name} -o tokens, or set data.trust=true to learn it as "
            "it is"
        )
    if not trust:
        refuse_binary(path)
    return path.name, _map_raw(path, Packing("uint8"))


def _open_tokens(path: Path, data: Data, vocab: int) -> Corpus:
    if data.separator >= vocab:
        raise UsageError(
            f"data.separator is {data.separator}, beyond model.vocab={vocab}; "
            f"it can be 0..{vocab - 1}, or -1 for none"
        )
    name, tokens = path.name, _map_npy(path) if path.suffix.lower() == ".npy" else None
    if tokens is None:
        packing = packing_of(path, data, vocab)
        name, tokens = f"{path.name} as {packing.dtype}", _map_raw(path, packing)
    corpus = Corpus(
        name=name,
        tokens=tokens,
        separator=data.separator if data.separator >= 0 else None,
        bytes_per_token=math.nan,
        vocab=vocab,
        files=(MappedFile.of(path),),
    )
    _scan(corpus)
    return corpus


def _open_shards(folder: Path, data: Data, vocab: int) -> Corpus:
    index = read_index(folder)
    largest = max(shard.largest for shard in index.shards)
    if largest >= vocab:
        raise DataError(
            f"{folder.name} has ids up to {largest}, of a tokenizer with {index.vocab} of them, "
            f"and model.vocab is {vocab}: set model.vocab to at least {index.vocab}"
        )
    if data.separator >= 0 and data.separator != index.end:
        raise UsageError(
            f"data.separator is {data.separator}, and {folder.name} ends its documents with "
            f"{index.end}; leave out data.separator"
        )
    mapped = map_shards(folder, index)
    return Corpus(
        name=f"{folder.name}, {_count(index.num_documents, 'document')}",
        tokens=mapped.tokens,
        separator=index.end if index.end >= 0 else None,
        bytes_per_token=index.text_bytes / max(index.tokens, 1),
        vocab=vocab,
        files=mapped.files,
        learn=mapped.learn,
        folder=folder,
        largest=largest,
    )


def _scan(corpus: Corpus) -> None:
    """Look for unknown ids before the first step: everywhere, or here and there if it is long."""
    if corpus.always_known:
        return
    starts = np.arange(0, len(corpus), SCAN_CHUNK)
    if len(starts) > SCAN_CHUNKS:
        starts = np.linspace(0, len(corpus) - SCAN_CHUNK, SCAN_CHUNKS, dtype=np.int64)
    for start in starts:
        chunk = corpus.tokens[start : start + SCAN_CHUNK]
        corpus.require_known(chunk[None, :], np.array([start]))


def _map_npy(path: Path) -> Tokens:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(
            f"{path.name} is damaged or not a .npy array of numbers; "
            "write it with numpy.save(path, ids.astype(numpy.uint16))"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise DataError(
            f"{path.name} holds {array.dtype} {list(array.shape)}; token ids are whole numbers in "
            "one row: numpy.save(path, ids.astype(numpy.uint16).ravel())"
        )
    return np.asarray(array)


def _map_raw(path: Path, packing: Packing) -> Tokens:
    dtype = np.dtype(packing.dtype)
    if path.stat().st_size <= packing.offset:
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=packing.offset))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
