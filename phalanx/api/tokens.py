"""Token shards from text, and what a corpus holds: what `phalanx data` does."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.run import Data
from phalanx.data.corpus import open_corpus
from phalanx.data.shards import damaged_shards, is_tokens, read_index, tokenizer_of
from phalanx.data.tokenize import TokenizeProgress, Wanted, tokenize
from phalanx.data.tokenizers import Tokenizer

__all__ = ["CorpusContents", "TokenizeProgress", "Wanted", "show_corpus", "tokenize"]

SCHEMA = 1
_ANY_VOCAB = 1 << 40  # nobody has said yet which model will read it


@dataclass(frozen=True, kw_only=True)
class CorpusContents:
    """What a corpus holds.

    Attributes:
        path: of it.
        name: as a run shows it.
        token_dtype: of an id.
        tokens: how many.
        num_documents: how many; None where only reading all of it would say.
        separator: the id that ends a document; None where nobody said.
        bytes_per_token: of the text; None where it is not known.
        learned: tokens that are to be learned; None where all are.
        vocab: ids of the tokenizer; None where it is not known.
        tokenizer: its kind, or empty.
        hash: over all of it as the index has it; else of its beginning, middle and end.
        first_ids: of the corpus.
        first_text: the same as text, where the tokenizer is known.
        damaged: shards that are not what the index says; None where nobody looked.
    """

    path: str
    name: str
    token_dtype: str
    tokens: int
    num_documents: int | None
    separator: int | None
    bytes_per_token: float | None
    learned: int | None
    vocab: int | None
    tokenizer: str
    hash: str
    first_ids: list[int]
    first_text: str | None
    damaged: list[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `phalanx data show --json` prints."""
        return {"schema": SCHEMA, **vars(self)}


def show_corpus(
    path: Path,
    *,
    verify: bool = False,
    count: int = 64,
    keys: dict[str, Any] | None = None,
    on_shard: Callable[[], None] = lambda: None,
) -> CorpusContents:
    """Say what a corpus holds, without reading all of it.

    Args:
        path: whatever `data.path` can be.
        verify: read all shards, and compare them with the index.
        count: of the first tokens to show.
        keys: other keys of `[data]`, for a file that does not say what its ids are.
        on_shard: called after each shard that was found damaged.

    Raises:
        DataError: it cannot be read.
        UsageError: there is none, or nothing says what its ids are.
    """
    data = Data(path=str(path), **(keys or {}))
    corpus = open_corpus(data, _ANY_VOCAB)
    first = corpus.tokens[:count].tolist()
    index, tokenizer, damaged = None, _of_bytes(corpus.is_text), None
    if is_tokens(path):
        index, tokenizer = read_index(path), tokenizer_of(path)
        if verify:
            damaged = []
            for name in damaged_shards(path, index):
                damaged.append(name)
                on_shard()
    known = corpus.bytes_per_token == corpus.bytes_per_token  # nan is unknown
    return CorpusContents(
        path=str(path),
        name=corpus.name,
        token_dtype=corpus.token_dtype,
        tokens=len(corpus),
        num_documents=index.num_documents if index else None,
        separator=corpus.separator,
        bytes_per_token=corpus.bytes_per_token if known else None,
        learned=index.learned if index and index.prompts_masked else None,
        vocab=index.vocab if index else None,
        tokenizer=index.tokenizer if index else "",
        hash=index.hash if index else corpus.fingerprint,
        first_ids=first,
        first_text=tokenizer.engine.decode(first) if tokenizer else None,
        damaged=damaged,
    )


def _of_bytes(is_text: bool) -> Tokenizer | None:
    from phalanx.data.tokenizers import open_tokenizer

    return open_tokenizer("bytes") if is_text else None
