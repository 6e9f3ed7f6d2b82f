"""Makes token shards of text: side by side in several processes, and resumable.

What is to be done is planned first, from the source alone. Each part of it becomes one shard,
written under another name and renamed when it is whole, with a line that says so. Started again,
the same command goes on with the parts that are missing; whoever interrupts it loses a part each.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, PhalanxError, UsageError
from phalanx.data.chat import learned_pieces
from phalanx.data.documents import Document, FilePart, Source, documents, find_source
from phalanx.data.processes import leaving_main_alone
from phalanx.data.shards import (
    INDEX,
    TOKENIZER,
    TokenIndex,
    TokenShard,
    hash_of,
    read_index,
)
from phalanx.data.tokenizers import CARRIED, Tokenizer, open_tokenizer

PLAN = "plan.json"
_BATCH_CHARACTERS = 1 << 20  # of text that a library is given at once
_UINT8_IDS, _UINT16_IDS = 1 << 8, 1 << 16


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be made.

    Attributes:
        source: a file or a folder.
        tokenizer: a folder, a file, or "bytes".
        out: folder of the shards.
        column: of the text in records.
        end: the token that ends a document, by text or number; "none" for none, "" for the
            tokenizer's own.
        begin: every document begins with the tokenizer's first token.
        template: a Jinja file that renders chats, over that of the tokenizer; empty for its own.
        vocab: ids of the model that will learn; 0 where it is not known yet.
    """

    source: Path
    tokenizer: str = "bytes"
    out: Path = Path("tokens")
    column: str = "text"
    end: str = ""
    begin: bool = False
    template: str = ""
    vocab: int = 0


class TokenizeProgress(NamedTuple):
    """How far it is.

    Attributes:
        parts, done: how many parts there are, and are done.
        tokens: made so far, in this and earlier starts.
        bytes: of text that they were made from.
        seconds: since this start.
    """

    parts: int
    done: int
    tokens: int
    bytes: int
    seconds: float


def tokenize(
    wanted: Wanted, workers: int, on_progress: Callable[[TokenizeProgress], None] = lambda _: None
) -> TokenIndex:
    """Make token shards, or go on with making them.

    Args:
        wanted: what is to be made.
        workers: processes; at least 1.
        on_progress: told at the start and after every part.

    Raises:
        UsageError: source or tokenizer are none, or the folder is of something else.
        DataError: a file of the source is damaged.
        PhalanxError: a library is missing, or a worker was ended.
    """
    source = find_source(wanted.source)
    tokenizer = configured(wanted)
    _require_room_for(tokenizer, wanted.vocab)
    plan = _plan(wanted, source, tokenizer)
    if _is_done(wanted.out, plan):
        return read_index(wanted.out)
    _take_over(wanted.out, plan, tokenizer)
    shards = {
        number: shard for number in range(len(source.parts)) if (shard := _made(wanted.out, number))
    }
    began = time.perf_counter()

    def tell() -> None:
        found = shards.values()
        tokens, size = sum(s.tokens for s in found), sum(s.text_bytes for s in found)
        seconds = time.perf_counter() - began
        on_progress(TokenizeProgress(len(source.parts), len(shards), tokens, size, seconds))

    tell()
    missing = [number for number in range(len(source.parts)) if number not in shards]
    for number, shard in _work(wanted, source, missing, min(workers, len(missing))):
        shards[number] = shard
        tell()
    return _finish(wanted, tokenizer, [shards[number] for number in sorted(shards)])


def configured(wanted: Wanted) -> Tokenizer:
    """The tokenizer, with what was said about the ends of documents.

    Raises:
        UsageError: it has no such token, or nobody knows which ends a document.
    """
    tokenizer = open_tokenizer(wanted.tokenizer)
    if wanted.template:
        template = Path(wanted.template).read_text(encoding="utf-8")
        tokenizer = replace(tokenizer, chat_template=template)
    if wanted.begin and tokenizer.begin is None:
        raise UsageError(f"{tokenizer.name} has no token that begins a document; leave out --begin")
    if wanted.end == "none":
        return replace(tokenizer, end=None)
    if wanted.end:
        return replace(tokenizer, end=tokenizer.id_called(wanted.end))
    if tokenizer.end is None:
        raise UsageError(
            f"nothing beside {tokenizer.name} says which token ends a document; give "
            "--end TOKEN, such as '</s>' or its number, or --end none"
        )
    return tokenizer


def _require_room_for(tokenizer: Tokenizer, vocab: int) -> None:
    if vocab and tokenizer.vocab > vocab:
        raise UsageError(
            f"{tokenizer.name} has {tokenizer.vocab:,} ids, and the model {vocab:,}: set "
            f"model.vocab to at least {tokenizer.vocab}, or use the tokenizer of the model"
        )


def _plan(wanted: Wanted, source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides every token that is made, so that only the same is gone on with."""
    digest = hashlib.blake2b(digest_size=16)
    for part in source.parts:
        for path, start, stop in part:
            status = path.stat()
            digest.update(f"{path}/{start}/{stop}/{status.st_size}/{status.st_mtime_ns};".encode())
    template = hashlib.blake2b(tokenizer.chat_template.encode(), digest_size=8).hexdigest()
    return {
        "source": str(wanted.source.absolute()),
        "parts": len(source.parts),
        "files": digest.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "column": wanted.column,
        "begin": wanted.begin,
        "template": template,
    }


def _is_done(out: Path, plan: dict[str, Any]) -> bool:
    """Whether the folder holds the same already.

    Raises:
        UsageError: it holds something else.
    """
    if not out.exists() or not any(out.iterdir()):
        return False
    if not (out / PLAN).is_file():
        raise UsageError(f"{out} exists and is not empty; choose another folder with -o")
    before = json.loads((out / PLAN).read_text(encoding="utf-8"))
    for key, value in plan.items():
        if before.get(key) != value:
            raise UsageError(
                f"{out} was begun with another {key} ({before.get(key)}, now {value}); choose "
                "another folder with -o, or delete it"
            )
    return (out / INDEX).is_file()


def _take_over(out: Path, plan: dict[str, Any], tokenizer: Tokenizer) -> None:
    out.mkdir(parents=True, exist_ok=True)
    _write(out / PLAN, plan)
    if tokenizer.path is None or (out / TOKENIZER).exists():
        return
    draft = out / f".{TOKENIZER}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    shutil.copyfile(tokenizer.path, draft / tokenizer.path.name)
    for name in CARRIED:
        if (tokenizer.path.parent / name).is_file():
            shutil.copyfile(tokenizer.path.parent / name, draft / name)
    draft.rename(out / TOKENIZER)


def _made(out: Path, number: int) -> TokenShard | None:
    """A part that is done; None where it is not."""
    file = out / f"{_name(number)}.json"
    if not file.is_file():
        return None
    return TokenShard(**json.loads(file.read_text(encoding="utf-8")))


def _name(number: int) -> str:
    return f"shard-{number:05d}"


def _work(
    wanted: Wanted, source: Source, missing: list[int], workers: int
) -> Iterator[tuple[int, TokenShard]]:
    """Do the parts that are missing, in any order."""
    if workers <= 1:
        tokenizer = configured(wanted)
        for number in missing:
            yield number, _make(wanted, tokenizer, number, source.parts[number])
        return
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process each, not all cores for each
    pool = ProcessPoolExecutor(workers, context, _open_once, (wanted,))
    try:
        running: dict[Future[TokenShard], int] = {}
        waiting = iter(missing)
        while True:
            with leaving_main_alone():  # a pool starts processes when it is given work
                while len(running) < 2 * workers and (new := next(waiting, None)) is not None:
                    running[pool.submit(_make_here, new, source.parts[new])] = new
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise PhalanxError(
            "a worker was ended, as the system does where memory runs out; what is done stays: "
            "start it again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]


_OPEN: dict[str, Any] = {}  # of a worker process: what all its parts share


def _open_once(wanted: Wanted) -> None:
    _OPEN.update(wanted=wanted, tokenizer=configured(wanted))


def _make_here(number: int, part: tuple[FilePart, ...]) -> TokenShard:
    return _make(_OPEN["wanted"], _OPEN["tokenizer"], number, part)


def _make(
    wanted: Wanted, tokenizer: Tokenizer, number: int, part: tuple[FilePart, ...]
) -> TokenShard:
    """Make one shard, and say that it is made."""
    name, out = _name(number), wanted.out
    writer = _Writer(out / f".{name}", tokenizer, begin=wanted.begin)
    with writer:
        for record in documents(part, wanted.column):
            writer.add(record)
    for suffix in writer.suffixes:
        (out / f".{name}{suffix}").rename(out / f"{name}{suffix}")
    shard = TokenShard(
        name=name,
        tokens=writer.tokens,
        num_documents=writer.documents,
        text_bytes=writer.bytes,
        learned=writer.learned,
        largest=writer.largest,
        hash=hash_of(out, name),
    )
    _write(out / f"{name}.json", shard._asdict())
    return shard


class _Writer:
    """Writes the files of one shard, some texts at a time.

    Attributes:
        tokens, documents, bytes, learned, largest: so far, as in a `TokenShard`.
        suffixes: of the files that it writes.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, *, begin: bool) -> None:
        self.tokens = self.documents = self.bytes = self.learned = self.largest = 0
        self.suffixes = [".bin", ".ends"]
        self._path, self._tokenizer = path, tokenizer
        self._begin = [tokenizer.begin] if begin and tokenizer.begin is not None else []
        self._end = [] if tokenizer.end is None else [tokenizer.end]
        self._dtype = dtype_of(tokenizer.vocab)
        self._waiting: list[Document] = []
        self._characters = 0
        self._starts = True  # the next record starts a document
        self._chats = False

    def __enter__(self) -> "_Writer":
        self._ids = Path(f"{self._path}.bin").open("wb")
        self._ends = Path(f"{self._path}.ends").open("wb")
        self._learn = Path(f"{self._path}.learn").open("wb")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        self._ids.close()
        self._ends.close()
        self._learn.close()
        if not self._chats:
            Path(f"{self._path}.learn").unlink()

    def add(self, record: Document) -> None:
        """Take one document, or a piece of one."""
        if not isinstance(record.value, str):
            self._flush()
            self._write_chat(record.value)
            return
        self._waiting.append(record)
        self._characters += len(record.value)
        if self._characters >= _BATCH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        texts = [record.value for record in self._waiting]
        self.bytes += sum(len(text.encode()) for text in texts)
        found: list[int] = []
        ends = []
        for ids, record in zip(
            self._tokenizer.engine.encode(texts, special=False), self._waiting, strict=True
        ):
            if self._starts:
                found += self._begin
            found += ids
            self._starts = record.ends
            if record.ends:
                found += self._end
                ends.append(self.tokens + len(found))
        self._waiting, self._characters = [], 0
        self._write(found, ends)
        if self._chats:
            raise DataError("a source holds chats, or plain texts, not both: keep them apart")

    def _write_chat(self, record: dict[str, Any]) -> None:
        if not self._chats:
            if self.tokens:
                raise DataError("a source holds chats, or plain texts, not both: keep them apart")
            self._chats = True
            self.suffixes.append(".learn")
        pieces = learned_pieces(record, self._tokenizer)
        found, mask = list(self._begin), bytearray(len(self._begin))
        encoded = self._tokenizer.engine.encode([piece.text for piece in pieces], special=True)
        for ids, piece in zip(encoded, pieces, strict=True):
            self.bytes += len(piece.text.encode())
            found += ids
            mask += bytes([piece.learned]) * len(ids)
        if self._end and found[-1:] != self._end:
            found += self._end
            mask += bytes([pieces[-1].learned])
        self._learn.write(mask)
        self._write(found, [self.tokens + len(found)], learned=sum(mask))

    def _write(self, ids: list[int], ends: list[int], learned: int | None = None) -> None:
        row = np.array(ids, dtype=self._dtype)
        row.tofile(self._ids)
        np.array(ends, dtype="<i8").tofile(self._ends)
        self.tokens += len(row)
        self.documents += len(ends)
        self.learned += len(row) if learned is None else learned
        self.largest = max(self.largest, int(row.max(initial=0)))


def dtype_of(vocab: int) -> np.dtype[Any]:
    """The narrowest type of ids that holds a vocabulary."""
    if vocab <= _UINT8_IDS:
        return np.dtype("u1")
    return np.dtype("<u2" if vocab <= _UINT16_IDS else "<u4")


def _finish(wanted: Wanted, tokenizer: Tokenizer, shards: list[TokenShard]) -> TokenIndex:
    """Write the index, and forget what only a part needed."""
    kept = tuple(shard for shard in shards if shard.tokens)
    if not kept:
        raise DataError(f"{wanted.source} has no tokens; a source has text or records in it")
    index = TokenIndex(
        dtype=dtype_of(tokenizer.vocab).name,
        vocab=tokenizer.vocab,
        end=-1 if tokenizer.end is None else tokenizer.end,
        tokenizer=tokenizer.kind,
        fingerprint=tokenizer.fingerprint,
        prompts_masked=any((wanted.out / f"{shard.name}.learn").exists() for shard in kept),
        source=str(wanted.source.absolute()),
        shards=kept,
    )
    _write(wanted.out / INDEX, index.to_dict())
    for shard in shards:
        (wanted.out / f"{shard.name}.json").unlink(missing_ok=True)
        if not shard.tokens:
            for suffix in (".bin", ".ends"):
                (wanted.out / f"{shard.name}{suffix}").unlink(missing_ok=True)
    return index


def _write(path: Path, document: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def ids_of(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    """The ids of one text, without what begins or ends a document.

    Args:
        tokenizer: makes them.
        text: any.
    """
    return np.array(tokenizer.engine.encode([text], special=False)[0], dtype=np.int64)
