"""How fast text becomes token shards, beside the batch encoding of `tokenizers` itself.

Both have the same text, tokenizer and cores. What counts is CPU seconds as well as seconds: on a
busy machine the latter say little. A 10 GB file of tokens is opened besides.

    python benchmarks/tokenizing.py --megabytes 20 --workers 2
"""

import argparse
import json
import os
import resource
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

from phalanx.core.run import Data
from phalanx.data.corpus import open_corpus
from phalanx.data.tokenize import Wanted, tokenize


def main() -> None:
    """Race, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        home = Path(parent)
        texts = write_text(home / "text.jsonl", args.megabytes * 1_000_000)
        train_tokenizer(texts[:200], args.vocab, home / "tokenizer.json")
        size = sum(len(text.encode()) for text in texts)
        rows = []
        for number in range(args.rounds):
            theirs = measure(lambda: library(texts, home / "tokenizer.json", args.workers))
            out = home / f"out{number}"
            wanted = Wanted(source=home / "text.jsonl", tokenizer=str(home), out=out, end="none")
            ours = measure(lambda wanted=wanted: tokenize(wanted, args.workers))
            rows.append((theirs, ours))
        report(rows, size)
        open_large(home / "large.bin")


def write_text(path: Path, size: int) -> list[str]:
    """Documents of about `size` bytes together: the sources of the standard library, in turn.

    Args:
        path: of the JSON lines to write.
        size: bytes.
    """
    texts, total = [], 0
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    while total < size:
        for source in sources:
            text = source.read_text(encoding="utf-8", errors="replace")
            texts.append(text)
            total += len(text)
            if total >= size:
                break
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def train_tokenizer(texts: list[str], vocab: int, path: Path) -> None:
    """A byte-level BPE.

    Args:
        texts: to learn from.
        vocab: ids.
        path: of the file.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, show_progress=False))
    made.save(str(path))


def library(texts: list[str], path: Path, workers: int) -> None:
    """What its users write: batches, in threads of its own, and the ids of each text.

    Args:
        texts: to encode.
        path: of the tokenizer.
        workers: threads.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    with tempfile.TemporaryFile() as file:
        for at in range(0, len(texts), 1000):
            for encoding in tokenizer.encode_batch(texts[at : at + 1000], add_special_tokens=False):
                np.array(encoding.ids, dtype=np.uint16).tofile(file)


def measure(work) -> tuple[float, float]:  # noqa: ANN001
    """Seconds, and CPU seconds of this process and those it started."""
    start, before = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - start, cpu_seconds() - before


def cpu_seconds() -> float:
    """Of this process and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def report(rows: list[tuple[tuple[float, float], tuple[float, float]]], size: int) -> None:
    """Print the best of each side.

    Args:
        rows: seconds and CPU seconds of the library and of us.
        size: bytes of text.
    """
    for name, place in (("seconds", 0), ("CPU seconds", 1)):
        theirs, ours = (min(row[side][place] for row in rows) for side in (0, 1))
        print(
            f"{name:12} tokenizers {theirs:6.2f}  phalanx {ours:6.2f}  "
            f"{theirs / ours:5.0%} of its speed ({size / ours / 1e6:.1f} MB/s)"
        )


def open_large(path: Path) -> None:
    """Open 10 GB of tokens that take no room on the disk."""
    with path.open("wb") as file:
        file.truncate(10_000_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    corpus = open_corpus(Data(path=str(path), token_dtype="uint16", trust=True), 50_257)
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"10 GB of {len(corpus):,} tokens opened in {seconds:.3f} s, {grown / 1024:.0f} MiB more")


if __name__ == "__main__":
    main()
