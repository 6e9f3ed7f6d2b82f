"""From a text to a model that another library loads and continues the text with."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.api.documents import DOCUMENTS
from phalanx.api.generation import Continuation, Evaluation
from phalanx.cli.main import main
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Recipe, Run
from phalanx.data.tokenize import Wanted, tokenize
from phalanx.trainer.checkpoint import Saver
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.state import own_pieces

SHAPE = ModelShape(layers=2, hidden=16, heads=4, kv_heads=2, vocab=256, tied=True)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that reads token shards of bytes, with a checkpoint of its first weights."""
    (tmp_path / "text.txt").write_text("def one():\n    return 1\n" * 40)
    tokenize(Wanted(source=tmp_path / "text.txt", out=tmp_path / "tokens"), 1)
    recipe = Recipe(seq=8, batch=2, init_std=0.3)
    run = Run(model=SHAPE, recipe=recipe, data=Data(path=str(tmp_path / "tokens")))
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    folder = tmp_path / "runs" / "small"
    saver = Saver(folder / "checkpoints", 0, 1, attempt="a")
    saver.save(1, own_pieces(engine), {})
    saver.wait()
    (folder / "run.toml").write_text(run.to_toml())
    return folder


def test_text_becomes_shards_and_the_command_says_what_is_in_them(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    words = ["data", "tokenize", str(tmp_path / "a.txt"), "-o", str(tmp_path / "out")]
    assert main([*words, "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 6
    assert main(["data", "show", str(tmp_path / "out"), "--verify"]) == 0
    assert "first text       'hello\\x00'" in capsys.readouterr().out
    (tmp_path / "out" / "shard-00000.bin").write_bytes(b"hollo\0")
    assert main(["data", "show", str(tmp_path / "out"), "--verify"]) == 4


def test_a_source_that_is_none_is_one_line(tmp_path, capsys):
    assert main(["data", "tokenize", str(tmp_path / "no"), "-o", str(tmp_path / "out")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_what_is_exported_continues_text_as_the_run_does(run_folder, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert main(["export", str(run_folder), str(out)]) == 0
    capsys.readouterr()
    options = ["--prompt", "def ", "--tokens", "12", "--temperature", "0", "--json"]
    written = []
    for model, layout in ((out, "dp=1"), (run_folder, "tp=2")):
        assert main(["generate", str(model), "--layout", layout, *options]) == 0
        written.append(json.loads(capsys.readouterr().out)["texts"][0])
    assert written[0] == written[1]
    reads = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = reads("def ", return_tensors="pt").input_ids
    assert ids.tolist() == [list(b"def ")]
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert theirs[0, 4:].tolist() == written[0]["ids"]


def test_a_text_is_measured_as_it_was_read(run_folder, tmp_path, capsys):
    assert main(["eval", str(run_folder), str(tmp_path / "text.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 40 * 24 // 8 * 8
    assert found["bits_per_byte"] == pytest.approx(found["nats"] / np.log(2), rel=0.01)
    assert set(found) == set(DOCUMENTS["eval"])


def test_documents_have_the_fields_of_the_reference():
    written = Continuation(prompt="a", text="b", ids=[1], ended=False).to_dict()
    assert {f"texts[].{key}" for key in written} == set(DOCUMENTS["generate"]) - {"schema"}
    found = Evaluation(model="", corpus="", nats=1.0, tokens=1, bytes_per_token=None).to_dict()
    assert set(found) == set(DOCUMENTS["eval"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give --prompt TEXT"),
        (["--prompt", "a", "--top-p", "0"], "--top-p is 0.0"),
        (["--prompt", "a", "--tokens", "0"], "--tokens is 0"),
    ],
)
def test_what_cannot_be_written_is_one_line(run_folder, capsys, options, says):
    assert main(["generate", str(run_folder), *options]) == 2
    assert says in capsys.readouterr().err
