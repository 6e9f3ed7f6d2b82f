"""Token shards: a folder of mapped files, and an index that says what is in them.

    tokens/
      index.json           written last: without it the folder is not complete
      shard-00000.bin      ids, uint8, uint16 or uint32, little endian, document after document
      shard-00000.ends     int64: where in the shard each document ends
      shard-00000.learn    uint8, of chats: 1 where the token is to be learned
      tokenizer/           the tokenizer that made them

Opening reads the index and maps the files: no token is read, whatever their number.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.data.mapped import MappedFile
from phalanx.data.row import TokenRow
from phalanx.data.tokenizers import Tokenizer, open_tokenizer

INDEX = "index.json"
FORMAT = "phalanx tokens"
SCHEMA = 1
TOKENIZER = "tokenizer"
_CHUNK = 1 << 22  # bytes, while hashing


class TokenShard(NamedTuple):
    """One file of ids.

    Attributes:
        name: of its files, without suffix.
        tokens, num_documents: how many are in it.
        text_bytes: of the text that they were made from, as UTF-8.
        learned: tokens that are to be learned.
        largest: the largest id.
        hash: 32 hex digits over its files.
    """

    name: str
    tokens: int
    num_documents: int
    text_bytes: int
    learned: int
    largest: int
    hash: str


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """What a folder of shards holds.

    Attributes:
        dtype: of an id.
        vocab: ids of the tokenizer.
        end: the id that ends each document; -1 where none does.
        tokenizer: its kind.
        fingerprint: of the tokenizer.
        prompts_masked: some tokens are read and not learned, such as prompts.
        source: what was tokenized.
        shards: in order.
    """

    dtype: str
    vocab: int
    end: int
    tokenizer: str
    fingerprint: str
    prompts_masked: bool
    source: str
    shards: tuple[TokenShard, ...]

    @property
    def tokens(self) -> int:
        """Of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Of all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        """Of the text, as UTF-8."""
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def learned(self) -> int:
        """Tokens that are to be learned."""
        return sum(shard.learned for shard in self.shards)

    @cached_property
    def hash(self) -> str:
        """32 hex digits over all shards."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(shard.hash.encode())
        return digest.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """What `index.json` says, and `phalanx data --json`."""
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            "tokens": self.tokens,
            "num_documents": self.num_documents,
            "text_bytes": self.text_bytes,
            "learned": self.learned,
            "hash": self.hash,
            **{key: value for key, value in asdict(self).items() if key != "shards"},
            "shards": [shard._asdict() for shard in self.shards],
        }


def is_tokens(path: Path) -> bool:
    """Whether a folder holds token shards, complete or not."""
    return (path / INDEX).is_file() or (path / "plan.json").is_file()


def read_index(folder: Path) -> TokenIndex:
    """Read what a folder of shards holds.

    Raises:
        DataError: it is not complete, damaged, or of a later version.
    """
    if not (folder / INDEX).is_file():
        raise DataError(
            f"{folder} is not complete: phalanx data tokenize was interrupted; the same command "
            "goes on with it"
        )
    try:
        said = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if said["format"] != FORMAT or said["schema"] > SCHEMA:
            raise ValueError(f"format {said['format']!r}, schema {said['schema']}")
        keys = TokenIndex.__dataclass_fields__.keys() - {"shards"}
        shards = tuple(TokenShard(**shard) for shard in said["shards"])
        return TokenIndex(shards=shards, **{key: said[key] for key in keys})
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / INDEX} is damaged, or of a later version: {error}") from error


class MappedShards(NamedTuple):
    """The shards of a folder, mapped.

    Attributes:
        tokens: ids of all shards, one after the other.
        learn: uint8, 1 where a token is to be learned; None where all are.
        files: of the ids.
    """

    tokens: TokenRow
    learn: TokenRow | None
    files: tuple[MappedFile, ...]


def map_shards(folder: Path, index: TokenIndex) -> MappedShards:
    """Map the ids of a folder; none is read.

    Args:
        folder: of the shards.
        index: of the folder.

    Raises:
        DataError: a file is missing, or of another size than the index says.
    """
    width = np.dtype(index.dtype).itemsize
    files = []
    for shard in index.shards:
        path = folder / f"{shard.name}.bin"
        if not path.is_file() or path.stat().st_size != shard.tokens * width:
            has = f"{path.stat().st_size:,} bytes" if path.is_file() else "is missing"
            raise DataError(
                f"{path} {has}; {INDEX} says {shard.tokens * width:,} bytes: tokenize again"
            )
        files.append(MappedFile.of(path))
    learn = None
    if index.prompts_masked:
        learn = TokenRow(tuple(_map(folder / f"{s.name}.learn", "uint8") for s in index.shards))
    ids = tuple(_map(file.path, index.dtype) for file in files)
    return MappedShards(TokenRow(ids, np.dtype(index.dtype)), learn, tuple(files))


def document_ends(folder: Path, index: TokenIndex) -> NDArray[np.int64]:
    """Where each document ends, counted in tokens from the first of the folder: int64, rising.

    Args:
        folder: of the shards.
        index: of the folder.

    Raises:
        OSError: a file is missing.
    """
    ends, start = [], 0
    for shard in index.shards:
        ends.append(np.fromfile(folder / f"{shard.name}.ends", "<i8") + start)
        start += shard.tokens
    return np.concatenate(ends) if ends else np.empty(0, np.int64)


def hash_of(folder: Path, name: str) -> str:
    """32 hex digits over the files of one shard, as they lie there.

    Args:
        folder: of the shards.
        name: of the shard.

    Raises:
        OSError: a file is missing.
    """
    digest = hashlib.blake2b(digest_size=16)
    for suffix in (".bin", ".ends", ".learn"):
        path = folder / f"{name}{suffix}"
        if suffix == ".learn" and not path.exists():
            continue
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def damaged_shards(folder: Path, index: TokenIndex) -> Iterator[str]:
    """The names of shards whose files are not what the index says; all of them are read.

    Args:
        folder: of the shards.
        index: of the folder.
    """
    for shard in index.shards:
        try:
            found = hash_of(folder, shard.name)
        except OSError:
            found = ""
        if found != shard.hash:
            yield shard.name


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The tokenizer that made the shards of a folder; None where it is not known.

    Raises:
        PhalanxError: the library that reads it is missing.
    """
    index = read_index(folder)
    home = folder / TOKENIZER
    if index.tokenizer == "bytes":
        return open_tokenizer("bytes")
    return open_tokenizer(home) if home.is_dir() else None


def _map(path: Path, dtype: str) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
