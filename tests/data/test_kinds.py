"""What is not text is not learned as text, unless it is trusted."""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import DataError
from phalanx.core.run import Data
from phalanx.data.corpus import open_corpus


def opened(path, **keys):
    return open_corpus(Data(path=str(path), **keys), vocab=256)


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"weights" * 100)
    return file.getvalue()


def safetensors():
    header = b'{"w":{"dtype":"F32","shape":[64],"data_offsets":[0,256]}}'
    return len(header).to_bytes(8, "little") + header + np.ones(64, "f4").tobytes()


NOT_TEXT = {
    "run": (Path(sys.executable).read_bytes()[:4096], "an executable"),
    "model.pt": (zipped(), "a zip archive, as torch.save writes"),
    "model.safetensors": (safetensors(), r"a safetensors file: .* model\.weights"),
    "table": (b"PAR1" + bytes(100), "a Parquet file"),
    "noise": (np.random.default_rng(0).bytes(4096), "binary"),
    "floats": (np.ones(1000).tobytes(), "binary"),
}


@pytest.mark.parametrize("name", NOT_TEXT)
def test_a_binary_file_is_named_and_refused(tmp_path, name):
    content, kind = NOT_TEXT[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} is not text but {kind}.*data\.trust=true"):
        opened(tmp_path / name)
    assert bytes(opened(tmp_path / name, trust=True).tokens) == content


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_noticed_with_its_mark_and_without(tmp_path, code):
    content = ("It was a dark and stormy night. " * 20).encode(code)
    (tmp_path / "book.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"UTF-16 text.*iconv -f UTF-16 -t UTF-8 book.txt"):
        opened(tmp_path / "book.txt")


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))
def test_any_text_is_text(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(text, encoding="utf-8", newline="")
    assert bytes(opened(path).tokens) == text.encode()


def test_an_8_bit_code_and_zeros_between_documents_are_text(tmp_path):
    content = b"\0".join(f"Straße {i}, größer".encode("latin-1") for i in range(200))
    (tmp_path / "book.txt").write_bytes(content)
    assert bytes(opened(tmp_path / "book.txt").tokens) == content


@pytest.mark.parametrize("name", ["chat.jsonl", "table.parquet"])
def test_records_are_not_trained_on_as_they_stand(tmp_path, name):
    (tmp_path / name).write_text('{"text": "hello"}\n' * 10)
    with pytest.raises(DataError, match=f"{name} holds records.*phalanx data tokenize"):
        opened(tmp_path / name)
    assert len(opened(tmp_path / name, trust=True)) == 180
