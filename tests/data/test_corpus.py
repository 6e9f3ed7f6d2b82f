"""A corpus opens from every source in the same order, or says in one line what to change."""

import math
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import DataError, PhalanxError, UsageError
from phalanx.core.run import Data
from phalanx.data import corpus as corpus_module
from phalanx.data import text
from phalanx.data.corpus import Corpus, open_corpus


def opened(path, vocab=256, **keys):
    return open_corpus(Data(path=str(path), **keys), vocab=vocab)


def write_folder(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


@pytest.fixture(scope="module")
def library():
    return open_corpus(Data(), vocab=256)


# --- the standard library


def test_the_default_corpus_is_every_source_of_the_standard_library_but_its_tests(library):
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = [p.relative_to(root) for p in root.rglob("*.py")]
    paths = sorted(p.as_posix() for p in paths if not left_out & set(p.parts))
    sources = [content for path in paths if (content := (root / path).read_bytes())]
    assert bytes(library.tokens) == b"".join(source + b"\0" for source in sources)
    assert library.name == (
        f"Python {platform.python_version()} standard library, {len(sources)} files"
    )


def test_text_is_bytes_and_a_zero_ends_a_document(library):
    assert library.tokens.dtype == np.uint8
    assert library.separator == 0
    assert library.bytes_per_token == 1.0


def test_another_process_reads_the_same_standard_library(library):
    program = (
        "from phalanx.core.run import Data; from phalanx.data.corpus import open_corpus; "
        "print(open_corpus(Data(), vocab=256).fingerprint)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == library.fingerprint


def test_a_python_without_sources_says_to_name_a_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=r"no Python sources in .* name a text with data\.path"):
        open_corpus(Data(), vocab=256)


# --- texts


def test_a_text_file_is_mapped_byte_by_byte(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_bytes("Löwe\0\xff".encode("latin-1"))
    corpus = opened(path)
    assert bytes(corpus.tokens) == b"L\xf6we\0\xff"
    assert (corpus.name, corpus.separator) == ("verse.txt", 0)
    assert not corpus.tokens.flags.owndata


def test_a_folder_is_joined_in_the_order_of_its_paths(tmp_path):
    write_folder(
        tmp_path / "books",
        {
            "b.txt": b"second",
            "a/z.md": b"first",
            "c": b"third",
            "empty.txt": b"",
            "photo.png": b"\x89PNG\0",
            ".hidden": b"no",
            ".git/config": b"no",
        },
    )
    corpus = opened(tmp_path / "books")
    assert bytes(corpus.tokens) == b"first\0second\0third\0"
    assert corpus.name == "books, 3 text files (1 binary skipped)"


def test_a_link_to_a_folder_is_followed_once(tmp_path):
    write_folder(tmp_path / "far", {"away.txt": b"far away"})
    write_folder(tmp_path / "books", {"a/one.txt": b"one", "two.txt": b"two"})
    (tmp_path / "books" / "far").symlink_to(tmp_path / "far")
    (tmp_path / "books" / "far_again").symlink_to(tmp_path / "far")
    (tmp_path / "books" / "a" / "up").symlink_to(tmp_path / "books")
    corpus = opened(tmp_path / "books")
    assert bytes(corpus.tokens) == b"one\0far away\0two\0"


def test_what_a_folder_holds_besides_text_is_counted(tmp_path):
    write_folder(
        tmp_path / "books", {"a.txt": b"text", "b.jsonl": b"{}", "c.npy": b"", "d.gz": b""}
    )
    assert opened(tmp_path / "books").name == "books, 1 text file (3 .gz, .jsonl, .npy skipped)"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("0.npy", "3 .npy files; a run reads one file of token ids"),
        ("0.jsonl", "phalanx data tokenize"),
    ],
)
def test_a_folder_of_token_files_or_records_says_what_to_do(tmp_path, name, says):
    write_folder(tmp_path, {f"{i}{name}": b"\1" for i in range(3)})
    with pytest.raises(DataError, match=says):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("files", "found"),
    [({}, "no files"), ({"a.png": b"\0", "b.png": b"\0"}, "2 binary files"), ({"a": b""}, "")],
)
def test_a_folder_without_text_says_what_it_found(tmp_path, files, found):
    write_folder(tmp_path, files)
    with pytest.raises(DataError, match=f"no text in .*: found {found}.*; data.path can be a text"):
        opened(tmp_path)


def test_a_folder_too_large_for_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    write_folder(tmp_path, {"a.txt": b"x" * 700, "b.txt": b"y" * 700})
    monkeypatch.setattr(text, "FOLDER_LIMIT", 1000)
    with pytest.raises(DataError, match="join the texts into one file"):
        opened(tmp_path)


def test_bytes_need_256_ids(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    with pytest.raises(DataError, match=r"model.vocab is 255; set model.vocab to at least 256"):
        opened(path, vocab=255)


def test_a_text_has_its_own_separator(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    for named in (path, ""):
        with pytest.raises(UsageError, match=r"data.separator is 3, .*leave it out"):
            opened(named, separator=3)


# --- token files


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64", ">u2"])
def test_a_npy_file_is_mapped_as_it_is(tmp_path, dtype):
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(100).astype(dtype))
    corpus = opened(path, vocab=100)
    assert corpus.tokens.tolist() == list(range(100))
    assert not corpus.tokens.flags.owndata
    assert (corpus.name, corpus.separator) == ("ids.npy", None)
    assert math.isnan(corpus.bytes_per_token)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_a_raw_file_is_mapped_as_the_type_it_is_said_to_be(tmp_path, dtype):
    path = tmp_path / "ids.bin"
    np.arange(100, dtype=dtype).tofile(path)
    corpus = opened(path, vocab=100, token_dtype=dtype, separator=7)
    assert corpus.tokens.tolist() == list(range(100))
    assert (corpus.name, corpus.separator) == (f"ids.bin as {dtype}", 7)


@pytest.mark.parametrize(
    ("array", "says"),
    [(np.ones(4), r"float64 \[4\]"), (np.ones((2, 3), np.int32), r"int32 \[2, 3\]")],
)
def test_a_npy_file_of_another_kind_says_how_to_write_one(tmp_path, array, says):
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(DataError, match=rf"holds {says}; .*numpy.save"):
        opened(tmp_path / "ids.npy")


@pytest.mark.parametrize("content", [b"junk", b"", b"\x93NUMPY\x01\x00\x04", "cut", "objects"])
def test_a_damaged_npy_file_is_refused(tmp_path, content):
    path = tmp_path / "ids.npy"
    if content == "cut":
        np.save(path, np.arange(1000))
        content = path.read_bytes()[:500]
    elif content == "objects":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
        content = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged or not a .npy array"):
        opened(path)


def test_a_raw_file_of_odd_size_names_the_types_that_fit(tmp_path):
    (tmp_path / "ids.bin").write_bytes(b"\0" * 6)
    with pytest.raises(DataError, match=r"has 6 bytes.*uint32.*can be uint8 or uint16"):
        opened(tmp_path / "ids.bin", token_dtype="uint32")


@pytest.mark.parametrize("separator", [100, 101])
def test_a_separator_beyond_the_vocabulary_is_refused(tmp_path, separator):
    np.save(tmp_path / "ids.npy", np.arange(100))
    with pytest.raises(UsageError, match=r"data.separator is 10.*0\.\.99"):
        opened(tmp_path / "ids.npy", vocab=100, separator=separator)


# --- ids beyond the vocabulary


@given(length=st.integers(1, 300), where=st.integers(0, 299), vocab=st.integers(2, 60_000))
def test_an_unknown_id_is_named_with_its_place_and_what_to_change(
    tmp_path_factory, length, where, vocab
):
    ids = np.zeros(length, dtype=np.uint16)
    ids[where % length] = vocab
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, ids)
    says = (
        f"token {where % length} of ids.npy is {vocab}, beyond model.vocab={vocab}: "
        f"set model.vocab to at least {vocab + 1}"
    )
    with pytest.raises(DataError, match=says):
        opened(path, vocab=vocab)
    assert len(opened(path, vocab=vocab + 1)) == length


def test_a_negative_id_is_unknown(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([1, 2, -1]))
    with pytest.raises(DataError, match=r"token 2 of ids.npy is -1; ids lie in 0\.\.9"):
        opened(tmp_path / "ids.npy", vocab=10)


def test_the_whole_file_is_scanned_chunk_by_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "SCAN_CHUNK", 10)
    ids = np.zeros(155, dtype=np.uint16)
    ids[154] = 9
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(DataError, match=r"token 154 of ids.npy is 9"):
        opened(tmp_path / "ids.npy", vocab=9)


def test_a_long_file_is_sampled_to_its_very_end(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "SCAN_CHUNK", 10)
    ids = np.zeros(1003, dtype=np.uint16)
    ids[1002] = 9
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(DataError, match=r"token 1,002 of ids.npy is 9"):
        opened(tmp_path / "ids.npy", vocab=9)


# --- what cannot be opened


def test_what_does_not_exist_says_what_can_be_given(tmp_path):
    with pytest.raises(
        UsageError, match=r"nothing.txt' does not exist; it can be a text file, a f"
    ):
        opened(tmp_path / "nothing.txt", separator=0)


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.npy"])
def test_an_empty_file_says_so(tmp_path, name):
    (tmp_path / name).touch()
    if name == "a.npy":
        np.save(tmp_path / name, np.empty(0, dtype=np.uint16))
    with pytest.raises(DataError, match=f"{name}.* is empty; data.path can be a text file"):
        opened(tmp_path / name)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        opened(tmp_path / "pipe")
    write_folder(tmp_path, {"a.txt": b"text"})
    assert bytes(opened(tmp_path).tokens) == b"text\0"


def test_a_compressed_text_is_not_taken_for_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match="not plain text; unpack it"):
        opened(tmp_path / "a.txt.gz")


@pytest.mark.parametrize("name", ["x" * 300, "a.txt/b", "loop"])
def test_a_path_that_the_system_refuses_is_one_line(tmp_path, name):
    (tmp_path / "a.txt").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(PhalanxError, match=r"can be a text file") as caught:
        opened(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_broken_link_in_a_folder_is_named(tmp_path):
    write_folder(tmp_path, {"a.txt": b"text"})
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*gone.txt: No such file"):
        opened(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
@pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.bin", "folder"])
def test_a_path_without_permission_is_named(tmp_path, name):
    path = tmp_path / name
    path.mkdir() if name == "folder" else path.write_bytes(b"text")
    path.chmod(0)
    with pytest.raises(DataError, match=f"cannot read .*{name}: Permission denied"):
        opened(path)
    path.chmod(0o700)


# --- parts of a corpus


def corpus_of(tokens, vocab=10**6):
    return Corpus(
        name="ids", tokens=np.asarray(tokens), separator=None, bytes_per_token=1.0, vocab=vocab
    )


@given(length=st.integers(1, 500), share=st.floats(0, 1, exclude_max=True), seq=st.integers(1, 50))
def test_a_split_loses_no_token_and_holds_out_the_end(length, share, seq):
    training, validation = corpus_of(np.arange(length)).split(share, seq)
    held_out = [] if validation is None else validation.tokens.tolist()
    assert training.tokens.tolist() + held_out == list(range(length))
    assert len(held_out) in (0, int(length * share))
    assert validation is None or (len(validation) > seq and validation.offset == len(training))


def test_nothing_is_held_out_when_no_sequence_fits():
    assert corpus_of(np.arange(100)).split(0.0)[1] is None
    assert corpus_of(np.arange(100)).split(0.2, seq=20)[1] is None
    assert len(corpus_of(np.arange(100)).split(0.2, seq=19)[1]) == 20


def test_an_unknown_id_in_the_validation_part_is_placed_in_the_whole_file():
    _, validation = corpus_of(np.arange(100), vocab=95).split(0.5)
    with pytest.raises(DataError, match="token 95 of ids is 95, beyond"):
        validation.require_known(validation.tokens[None, 40:], np.array([40]))


@given(st.lists(st.integers(0, 255), min_size=1), st.data())
def test_a_fingerprint_tells_texts_apart_but_not_their_types(ids, data):
    fingerprint = corpus_of(np.array(ids, dtype=np.uint8)).fingerprint
    assert fingerprint == corpus_of(np.array(ids, dtype=np.int32)).fingerprint
    changed = list(ids)
    changed[data.draw(st.integers(0, len(ids) - 1))] ^= 1
    assert fingerprint != corpus_of(changed).fingerprint
    assert fingerprint != corpus_of([*ids, 0]).fingerprint
