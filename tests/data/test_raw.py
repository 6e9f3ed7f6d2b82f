"""A token file is read as what it is, or refused with what to set: no width is taken on trust."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import DataError, PhalanxError, UsageError
from phalanx.core.run import Data
from phalanx.data.corpus import open_corpus

WIDTHS = ["uint8", "uint16", "uint32", "int32", "int64"]


def opened(path, vocab=256, **keys):
    return open_corpus(Data(path=str(path), **keys), vocab=vocab)


def ids_below(vocab, length=4000, dtype="int64", seed=0):
    return np.random.default_rng(seed).integers(0, vocab, length).astype(dtype)


def llm_c(path, ids, magic=20240520, version=1):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())


def megatron(path, ids, code, lengths):
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    starts = np.cumsum([0, *lengths[:-1]]) * ids.itemsize
    documents = np.arange(len(lengths) + 1)
    index += np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + documents.astype("<i8").tobytes())
    ids.tofile(path)


# --- what says itself what it is


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "u2"), (20240801, 7, "u4")])
def test_a_header_of_llm_c_is_recognised_and_not_learned(tmp_path, magic, version, dtype):
    ids = ids_below(300, dtype=dtype)
    llm_c(tmp_path / "ids.bin", ids, magic, version)
    corpus = opened(tmp_path / "ids.bin", vocab=300)
    assert corpus.tokens.tolist() == ids.tolist()
    assert corpus.name == f"ids.bin as {ids.dtype.name}"


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (8, "u2"), (4, "i4"), (5, "i8")])
def test_the_index_of_megatron_says_how_wide_an_id_is(tmp_path, code, dtype):
    ids = ids_below(200, dtype=dtype)
    megatron(tmp_path / "ids.bin", ids, code, [1000, 2500, 500])
    assert opened(tmp_path / "ids.bin").tokens.tolist() == ids.tolist()


def test_an_index_of_another_corpus_is_refused(tmp_path):
    ids = ids_below(200, dtype="u2")
    megatron(tmp_path / "ids.bin", ids, 8, [1000, 2500, 499])
    with pytest.raises(DataError, match=r"7,998 bytes, and ids.bin has 8,000; one of the two"):
        opened(tmp_path / "ids.bin")


def test_an_index_of_numbers_that_are_no_ids_is_refused(tmp_path):
    megatron(tmp_path / "ids.bin", np.ones(10), 6, [10])
    with pytest.raises(DataError, match="dtype code 6; ids can be uint8, int32, int64, uint16"):
        opened(tmp_path / "ids.bin")


@pytest.mark.parametrize(("about", "dtype"), [("gpt2|2", "u2"), ("llama|4", "u4"), ("gpt2", "u2")])
def test_what_datatrove_wrote_is_read_with_the_width_it_noted(tmp_path, about, dtype):
    ids = ids_below(200, dtype=dtype)
    ids.tofile(tmp_path / "00000.ds")
    (tmp_path / "00000.ds.metadata").write_text(f"{about}\n4000\n4 kT")
    assert opened(tmp_path / "00000.ds").tokens.tolist() == ids.tolist()


def test_what_a_header_says_is_not_overruled_by_mistake(tmp_path):
    ids = ids_below(200, dtype="u2")
    llm_c(tmp_path / "ids.bin", ids)
    with pytest.raises(
        UsageError, match=r"uint32, and the header of ids.bin .* says uint16; leave"
    ):
        opened(tmp_path / "ids.bin", token_dtype="uint32")
    assert opened(tmp_path / "ids.bin", token_dtype="uint16").tokens.tolist() == ids.tolist()


# --- what does not


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64"])
def test_bare_ids_are_refused_with_what_they_look_like(tmp_path, dtype):
    ids_below(200, dtype=dtype).tofile(tmp_path / "ids.bin")
    with pytest.raises(UsageError, match=f"look like {dtype}: set data.token_dtype={dtype}$"):
        opened(tmp_path / "ids.bin")


@pytest.mark.parametrize("dtype", WIDTHS)
def test_bare_ids_are_read_as_they_are_said_to_be(tmp_path, dtype):
    ids = ids_below(200, dtype=dtype)
    ids.tofile(tmp_path / "ids.bin")
    corpus = opened(tmp_path / "ids.bin", token_dtype=dtype)
    assert corpus.tokens.tolist() == ids.tolist()


@given(vocab=st.integers(2, 200_000), wide=st.sampled_from(["uint32", "int64"]), data=st.data())
def test_wide_ids_are_not_read_as_narrow_ones(tmp_path_factory, vocab, wide, data):
    """The file of row 3: ids below 256 as uint32, read as uint16, half of them zero."""
    path = tmp_path_factory.mktemp("ids") / "ids.bin"
    ids_below(vocab, dtype=wide, seed=data.draw(st.integers(0, 99))).tofile(path)
    with pytest.raises(DataError, match=f"read as uint16, .*Set data.token_dtype={wide}") as error:
        opened(path, vocab=max(vocab, 65536), token_dtype="uint16")
    assert "\n" not in str(error.value)
    assert len(opened(path, vocab=max(vocab, 65536), token_dtype="uint16", trust=True)) > 4000


def test_narrow_ids_read_as_wide_ones_do_not_ask_for_a_larger_vocabulary(tmp_path):
    ids_below(50257, dtype="uint16").tofile(tmp_path / "ids.bin")
    with pytest.raises(DataError, match=r"look like uint16: set data.token_dtype=uint16$"):
        opened(tmp_path / "ids.bin", vocab=50257, token_dtype="uint32")


@pytest.mark.parametrize("size", [256, 512, 1024, 4096])
def test_an_unknown_header_is_noticed_and_its_length_proposed(tmp_path, size):
    ids = ids_below(256, dtype="uint16", length=9000)
    (tmp_path / "ids.bin").write_bytes(b"\x77\x77\x34\x00".ljust(size, b"\0") + ids.tobytes())
    with pytest.raises(DataError, match=rf"first 2 bytes and nowhere else.*data.offset={size}$"):
        opened(tmp_path / "ids.bin", token_dtype="uint16")
    corpus = opened(tmp_path / "ids.bin", token_dtype="uint16", offset=size)
    assert corpus.tokens.tolist() == ids.tolist()


def test_an_offset_beyond_the_end_is_refused(tmp_path):
    ids_below(200, dtype="uint16").tofile(tmp_path / "ids.bin")
    with pytest.raises(DataError, match=r"8,000 bytes, and data\.offset skips 9,000"):
        opened(tmp_path / "ids.bin", token_dtype="uint16", offset=9000)


def test_ids_really_beyond_the_vocabulary_still_ask_for_a_larger_one(tmp_path):
    ids_below(300, dtype="uint16").tofile(tmp_path / "ids.bin")
    with pytest.raises(DataError, match=r"set model\.vocab to at least 300"):
        opened(tmp_path / "ids.bin", token_dtype="uint16")


@given(content=st.binary(max_size=200), dtype=st.sampled_from([*WIDTHS, "auto"]))
def test_any_bytes_open_or_are_refused_in_one_line(tmp_path_factory, content, dtype):
    path = tmp_path_factory.mktemp("ids") / "ids.bin"
    path.write_bytes(content)
    try:
        said = opened(path, token_dtype=dtype).name
    except PhalanxError as error:
        said = str(error)
    assert said.startswith(("ids.bin", "read as", "token", "data.token_dtype"))
    assert "\n" not in said
