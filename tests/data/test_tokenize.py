"""Token shards hold what a tokenizer makes of a source, however it is read and however often."""

import gzip
import json
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.core.errors import DataError, UsageError
from phalanx.core.run import Data
from phalanx.data import documents as reading
from phalanx.data.batches import IGNORED, SampleStream
from phalanx.data.corpus import open_corpus
from phalanx.data.shards import damaged_shards, document_ends, map_shards, read_index, tokenizer_of
from phalanx.data.tokenize import Wanted, tokenize
from phalanx.data.tokenizers import open_tokenizer

tokenizers = pytest.importorskip("tokenizers")
TEXTS = ["the cat sat on the mat\n", "a dog\n\nran. ", "Löwe 🦁 and lamb"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A byte-level BPE with an end of text, as Transformers keeps one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|bot|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 20, trainer)
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}"
        "{{ m.content }}{% if m.role != 'user' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|bot|>{% endif %}"
    )
    said = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def wanted(source: Path, out: Path, **options) -> Wanted:
    return Wanted(source=source, out=out, **options)


def ids_in(folder: Path) -> list[int]:
    index = read_index(folder)
    return map_shards(folder, index).tokens[:].tolist()


def plain(tokenizer: Path, texts: list[str]) -> list[int]:
    """What the library itself makes of some documents."""
    engine = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return [i for text in texts for i in (*engine.encode(text).ids, 0)]


def write_records(folder: Path, kind: str) -> Path:
    rows = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / f"records.{kind}"
    match kind:
        case "jsonl":
            path.write_bytes(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "jsonl.xz":
            path.write_bytes(lzma.compress(lines))
        case "jsonl.zst":
            path.write_bytes(pytest.importorskip("zstandard").compress(lines))
        case "parquet":
            arrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(
                arrow.Table.from_pylist(rows), path, row_group_size=2
            )
        case "arrow":
            arrow = pytest.importorskip("pyarrow")
            table = arrow.Table.from_pylist(rows)
            with (
                arrow.OSFile(str(path), "wb") as file,
                arrow.ipc.new_stream(file, table.schema) as to,
            ):
                to.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.xz", "jsonl.zst", "parquet", "arrow"])
def test_every_kind_of_records_gives_the_ids_of_the_library(tmp_path, tokenizer, kind):
    path = write_records(tmp_path, kind)
    index = tokenize(wanted(path, tmp_path / "out", tokenizer=str(tokenizer)), 1)
    assert ids_in(tmp_path / "out") == plain(tokenizer, TEXTS)
    assert (index.num_documents, index.end, index.dtype) == (3, 0, "uint16")
    assert index.text_bytes == sum(len(text.encode()) for text in TEXTS)
    ends = document_ends(tmp_path / "out", index)
    assert [ids_in(tmp_path / "out")[end - 1] for end in ends] == [0, 0, 0]


def test_a_folder_is_read_in_the_order_of_its_paths_and_a_zero_byte_ends_a_document(tmp_path):
    books = tmp_path / "books"
    books.mkdir()
    (books / "b.txt").write_bytes(b"two\0three")
    (books / "a.txt").write_bytes(b"one")
    (books / "c.png").write_bytes(b"\x89PNG\0\1\2" * 30)
    tokenize(wanted(books, tmp_path / "out"), 1)
    assert bytes(ids_in(tmp_path / "out")) == b"one\0two\0three\0"
    assert tokenizer_of(tmp_path / "out").kind == "bytes"


def test_large_files_are_cut_so_that_the_ids_do_not_depend_on_the_parts(tmp_path, monkeypatch):
    lines = "".join(f"line {i} of a long document\n" for i in range(400))
    (tmp_path / "long.txt").write_text(lines)
    found = []
    for size in (1 << 20, 4000):
        monkeypatch.setattr(reading, "PART_BYTES", size)
        monkeypatch.setattr(reading, "PIECE_BYTES", 1000)
        out = tmp_path / str(size)
        index = tokenize(wanted(tmp_path / "long.txt", out), 1)
        found.append(ids_in(out))
        assert index.num_documents == 1
    assert len(read_index(tmp_path / "4000").shards) > 1
    assert found[0] == found[1] == [*lines.encode(), 0]


def test_json_lines_are_each_in_one_part(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PART_BYTES", 300)
    texts = ["x" * (i % 37) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    index = tokenize(wanted(tmp_path / "a.jsonl", tmp_path / "out"), 1)
    assert len(index.shards) > 5
    assert bytes(ids_in(tmp_path / "out")) == "".join(t + "\0" for t in texts).encode()


def test_several_workers_make_the_same_shards(tmp_path, monkeypatch):
    for name in "abcd":
        (tmp_path / "books").mkdir(exist_ok=True)
        (tmp_path / "books" / f"{name}.txt").write_text(name * 1000)
    monkeypatch.setattr(reading, "PART_BYTES", 1500)
    one = tokenize(wanted(tmp_path / "books", tmp_path / "one"), 1)
    two = tokenize(wanted(tmp_path / "books", tmp_path / "two"), 2)
    assert len(one.shards) == 4
    assert one.hash == two.hash


def test_what_was_interrupted_goes_on_with_the_parts_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PART_BYTES", 1500)
    (tmp_path / "books").mkdir()
    for name in "abc":
        (tmp_path / "books" / f"{name}.txt").write_text(name * 1000)
    asked = wanted(tmp_path / "books", tmp_path / "out")

    def interrupt(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(asked, 1, interrupt)
    with pytest.raises(DataError, match="the same command"):
        read_index(tmp_path / "out")
    first = (tmp_path / "out" / "shard-00000.bin").stat().st_mtime_ns
    done = []
    tokenize(asked, 1, lambda progress: done.append(progress.done))
    assert done == [2, 3]
    assert (tmp_path / "out" / "shard-00000.bin").stat().st_mtime_ns == first
    assert bytes(ids_in(tmp_path / "out")) == b"".join(bytes([c]) * 1000 + b"\0" for c in b"abc")


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    tokenize(wanted(tmp_path / "a.txt", tmp_path / "out"), 1)
    with pytest.raises(UsageError, match="begun with another column"):
        tokenize(wanted(tmp_path / "a.txt", tmp_path / "out", column="body"), 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        tokenize(wanted(tmp_path / "a.txt", tmp_path / "full"), 1)


def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("text")
    asked = wanted(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tokenizer), vocab=100)
    with pytest.raises(UsageError, match=r"ids, and the model 100: set model.vocab to at least"):
        tokenize(asked, 1)
    tokenize(replace(asked, vocab=0), 1)
    with pytest.raises(DataError, match=r"model\.vocab is 10: set model\.vocab"):
        open_corpus(Data(path=str(tmp_path / "out")), 10)


def test_a_text_that_names_a_special_token_does_not_end_there(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("the <|end|> cat")
    tokenize(wanted(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tokenizer)), 1)
    ids = ids_in(tmp_path / "out")
    assert ids.count(0) == 1
    assert open_tokenizer(tokenizer).engine.decode(ids[:-1]) == "the <|end|> cat"


def test_of_a_chat_the_answers_alone_are_learned(tmp_path, tokenizer):
    chat = [("user", "hi"), ("assistant", "cat"), ("user", "and"), ("assistant", "dog")]
    record = {"messages": [{"role": role, "content": text} for role, text in chat]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(record) + "\n")
    index = tokenize(
        wanted(tmp_path / "chats.jsonl", tmp_path / "out", tokenizer=str(tokenizer)), 1
    )
    mapped = map_shards(tmp_path / "out", index)
    engine = open_tokenizer(tokenizer).engine
    kept = [i for i, learn in zip(mapped.tokens[:], mapped.learn[:], strict=True) if learn]
    assert engine.decode(kept) == "cat<|end|>dog<|end|>"
    assert (
        engine.decode(mapped.tokens[:].tolist())
        == "<|user|>hi<|bot|>cat<|end|><|user|>and<|bot|>dog<|end|>"
    )


def test_tokens_that_are_not_to_be_learned_are_no_targets(tmp_path):
    rows = [{"prompt": "abcd", "completion": "EFGH"} for _ in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize(wanted(tmp_path / "a.jsonl", tmp_path / "out"), 1)
    corpus = open_corpus(Data(path=str(tmp_path / "out")), 256)
    batch = SampleStream(corpus, seq=18, batch=2, seed=0).batch(0, range(2))
    assert set(batch.targets.ravel()) - {IGNORED} == set(b"EFGH\0")
    masked = np.isin(batch.tokens, list(b"\0ABCDabc"))
    assert (batch.targets[masked] == IGNORED).all()


def test_a_flipped_byte_is_found(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    index = tokenize(wanted(tmp_path / "a.txt", tmp_path / "out"), 1)
    assert list(damaged_shards(tmp_path / "out", index)) == []
    path = tmp_path / "out" / "shard-00000.bin"
    path.write_bytes(b"T" + path.read_bytes()[1:])
    assert list(damaged_shards(tmp_path / "out", index)) == ["shard-00000"]


def test_windows_reach_over_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PART_BYTES", 60)
    (tmp_path / "books").mkdir()
    for name in "abcdef":
        (tmp_path / "books" / f"{name}.txt").write_text(name * 50)
    index = tokenize(wanted(tmp_path / "books", tmp_path / "out"), 1)
    corpus = open_corpus(Data(path=str(tmp_path / "out")), 256)
    assert len(index.shards) == 6
    whole = b"".join(bytes([c]) * 50 + b"\0" for c in b"abcdef")
    found = corpus.windows(np.array([0, 45, 200]), 80)
    assert [bytes(row.tolist()) for row in found] == [whole[s : s + 80] for s in (0, 45, 200)]
    training, held_out = corpus.split(0.3, 10)
    assert bytes(training.tokens[:].tolist() + held_out.tokens[:].tolist()) == whole
    assert held_out.document_ends()[-1] == len(held_out)
