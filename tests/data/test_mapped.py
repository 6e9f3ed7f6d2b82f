"""A file that is cut short while it is read ends in a line that names it, not in a signal."""

import os

import numpy as np
import pytest

from phalanx.core.errors import DataError
from phalanx.core.run import Data
from phalanx.data.batches import SampleStream
from phalanx.data.corpus import open_corpus


@pytest.fixture(params=["ids.bin", "ids.npy", "book.txt"])
def file(request, tmp_path):
    path = tmp_path / request.param
    ids = np.arange(65536, dtype="uint16") % 97 + 32
    match path.suffix:
        case ".npy":
            np.save(path, ids)
        case ".bin":
            ids.tofile(path)
        case _:
            ids.astype("uint8").tofile(path)
    return path


def stream(path):
    dtype = "uint16" if path.suffix == ".bin" else "auto"
    corpus = open_corpus(Data(path=str(path), token_dtype=dtype), vocab=256)
    return SampleStream(corpus, seq=1000, batch=64, seed=0)


def test_a_file_that_was_cut_short_is_named(file):
    samples = stream(file)
    samples.batch(0, range(64))
    os.truncate(file, 1000)
    with pytest.raises(DataError, match=rf"{file.name} was cut short.* and has 1,000; .*resume"):
        samples.batch(1, range(64))


def test_a_file_that_was_replaced_or_deleted_is_read_on(file):
    samples = stream(file)
    before = samples.batch(0, range(64)).tokens
    (file.parent / "new").write_bytes(b"short")
    (file.parent / "new").replace(file)
    assert (samples.batch(0, range(64)).tokens == before).all()
    file.unlink()
    assert (samples.batch(0, range(64)).tokens == before).all()
