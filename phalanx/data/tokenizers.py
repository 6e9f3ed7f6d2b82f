"""What turns text into ids: a `tokenizer.json`, a tiktoken file, a sentencepiece model, bytes.

Each is read by the library that it belongs to, which is imported only then. Text is text here: a
document that happens to contain `<|endoftext|>` does not end there. Only rendered chats may name
special tokens.

| kind | file | library |
|---|---|---|
| tokenizers | `tokenizer.json` | tokenizers |
| tiktoken | `*.tiktoken`, or `tokenizer.model` of lines | tiktoken |
| sentencepiece | `tokenizer.model`, `spiece.model` | sentencepiece |
| bytes | none | none |
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from phalanx.core.errors import PhalanxError, UsageError

KINDS = "a folder with tokenizer.json, a .tiktoken file, a sentencepiece .model, or bytes"
CARRIED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_MODELS = ("tokenizer.model", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model")
# Regular expressions that cut text before merges, by how many merges a file has; such a file does
# not say. Source: tiktoken_ext/openai_public.py; Llama 3 reference code, tokenizer.py.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_PATTERNS = {50256: _GPT2, 50257: _GPT2, 100256: _CL100K, 128000: _CL100K, 199998: _O200K}
_NUM_BYTES = 256


class TokenizerBackend(Protocol):
    """What a library does for us."""

    vocab: int

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Token ids of each text.

        Args:
            texts: any.
            special: whether a text may name special tokens.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of one token; None if there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer, and what is known of it.

    Attributes:
        kind: which library reads it.
        path: of its file; None of bytes.
        engine: that library.
        end: the id that ends a document; None where nobody said.
        begin: the id that a document of its model starts with; None where there is none.
        chat_template: Jinja, which renders a chat; empty where there is none.
    """

    kind: str
    path: Path | None
    engine: TokenizerBackend = field(repr=False)
    end: int | None = None
    begin: int | None = None
    chat_template: str = field(default="", repr=False)

    @property
    def vocab(self) -> int:
        """Ids lie below it."""
        return self.engine.vocab

    @property
    def name(self) -> str:
        """What to call it on a screen."""
        if self.path is None:
            return "bytes"
        home = self.path.absolute().parent
        return f"{home.name}/{self.path.name} ({self.kind})"

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ for another tokenizer."""
        digest = hashlib.blake2b(f"{self.kind}/{self.end}/{self.begin}".encode(), digest_size=8)
        if self.path is not None:
            digest.update(self.path.read_bytes())
        return digest.hexdigest()

    def id_called(self, token: str) -> int:
        """The id of a token by its number or its text.

        Raises:
            UsageError: it has none.
        """
        found = int(token) if token.isdecimal() else self.engine.id_of(token)
        if found is None or not 0 <= found < self.vocab:
            raise UsageError(f"{self.name} has no token {token!r}; it has ids 0..{self.vocab - 1}")
        return found


def open_tokenizer(path: str | Path) -> Tokenizer:
    """Open a tokenizer.

    Args:
        path: a folder as Transformers writes it, one of the files above, or "bytes".

    Raises:
        UsageError: there is none.
        PhalanxError: the library that reads it is missing, or cannot read it.

    Example:
        >>> open_tokenizer("bytes").engine.encode(["hi"], special=False)
        [[104, 105]]
    """
    if str(path) == "bytes":
        return Tokenizer(kind="bytes", path=None, engine=_Bytes(), end=0)
    file = _file_of(Path(path).expanduser())
    kind = _kind_of(file)
    try:
        engine = _ENGINES[kind](file)
    except PhalanxError:
        raise
    except Exception as error:  # each library has its own
        raise PhalanxError(f"{file} cannot be read by {kind}: {error}") from error
    said = _said(file.parent)
    return Tokenizer(
        kind=kind,
        path=file,
        engine=engine,
        end=_special(engine, said, "eos_token"),
        begin=_special(engine, said, "bos_token"),
        chat_template=_chat_template(file.parent, said),
    )


def library(name: str, extra: str = "data") -> ModuleType:
    """Import a library that the base install does not have.

    Args:
        name: of the module.
        extra: of this package, which brings it.

    Raises:
        PhalanxError: it is missing; the message says what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise PhalanxError(f"this needs {missing}: pip install 'phalanx[{extra}]'") from error


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"there is no tokenizer {path}; it can be {KINDS}")
    for name in ("tokenizer.json", *_MODELS):
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.tiktoken"))
    if not found:
        raise UsageError(f"{path} has no tokenizer; it can be {KINDS}")
    return found[0]


def _kind_of(file: Path) -> str:
    if file.suffix == ".json":
        return "tokenizers"
    with file.open("rb") as opened:
        first = opened.readline(400)
    word, _, rank = first.strip().partition(b" ")
    lines = file.suffix == ".tiktoken" or (rank.isdigit() and word.isascii())
    return "tiktoken" if lines else "sentencepiece"


def _said(folder: Path) -> dict[str, Any]:
    """What the files beside a tokenizer say of special tokens."""
    said: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            said |= {key: value for key, value in found.items() if value is not None}
    return said


def _special(engine: TokenizerBackend, said: dict[str, Any], key: str) -> int | None:
    token = said.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        return engine.id_of(text)
    own = getattr(engine, key, None)
    return own if isinstance(own, int) else None


def _chat_template(folder: Path, said: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = said.get("chat_template", "")
    return template if isinstance(template, str) else ""


class _Bytes:
    vocab = _NUM_BYTES

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < _NUM_BYTES).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        encoded = token.encode()
        return encoded[0] if len(encoded) == 1 else None


class _HuggingFace:
    def __init__(self, file: Path) -> None:
        self._tokenizer = library("tokenizers").Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        self._tokenizer.encode_special_tokens = not special
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        found = self._tokenizer.token_to_id(token)
        return found if isinstance(found, int) else None


class _Tiktoken:
    def __init__(self, file: Path) -> None:
        ranks = library("tiktoken.load").load_tiktoken_bpe(str(file))
        if len(ranks) not in _PATTERNS:
            known = ", ".join(f"{count:,}" for count in _PATTERNS)
            raise PhalanxError(
                f"{file} has {len(ranks):,} merges, and does not say how text is cut before them; "
                f"that is known for {known} merges: use the tokenizer.json of its model"
            )
        special = _tiktoken_special(file.parent, len(ranks))
        self._encoding = library("tiktoken").Encoding(
            name=file.name,
            pat_str=_PATTERNS[len(ranks)],
            mergeable_ranks=ranks,
            special_tokens=special,
        )
        self.vocab = max(len(ranks) - 1, *ranks.values(), *special.values()) + 1

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        if special:
            return [self._encoding.encode(text, allowed_special="all") for text in texts]
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode(list(ids)))

    def id_of(self, token: str) -> int | None:
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None


def _tiktoken_special(folder: Path, ranks: int) -> dict[str, int]:
    """Special tokens as the configuration beside the file has them; else the end of a text."""
    decoder = _said(folder).get("added_tokens_decoder", {})
    found = {str(entry["content"]): int(number) for number, entry in decoder.items()}
    return found or {"<|endoftext|>": ranks}


class _SentencePiece:
    def __init__(self, file: Path) -> None:
        module = library("sentencepiece")
        self._model = module.SentencePieceProcessor(model_file=str(file))
        self.vocab = int(self._model.get_piece_size())
        self.eos_token, self.bos_token = (
            found if found >= 0 else None for found in (self._model.eos_id(), self._model.bos_id())
        )

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        found = self._model.encode(list(texts), out_type=int, num_threads=1)
        return [list(ids) for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(i) for i in ids if i < self.vocab]))

    def id_of(self, token: str) -> int | None:
        found = int(self._model.piece_to_id(token))
        return found if self._model.id_to_piece(found) == token else None


_ENGINES: dict[str, Callable[[Path], TokenizerBackend]] = {
    "tokenizers": _HuggingFace,
    "tiktoken": _Tiktoken,
    "sentencepiece": _SentencePiece,
}
