import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.api.runfile import load_run
from phalanx.cli.main import main
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.trainer.checkpoint import Saver
from phalanx.trainer.engine.engine import build_engine
from phalanx.trainer.model.huggingface import import_hf
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.state import own_pieces

SHAPE = ModelShape(layers=2, hidden=16, heads=4, kv_heads=2, vocab=40, tied=True)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with a checkpoint after steps 10 and 20; the weights of the later one are doubled."""
    folder = tmp_path / "runs" / "small"
    run = Run(model=SHAPE, layout=Layout(), recipe=Recipe(seq=8, batch=2))
    engine = build_engine(run, build_mesh(run.layout, torch.device("cpu")))
    saver = Saver(folder / "checkpoints", 0, 1, attempt="a")
    for step in (10, 20):
        saver.save(step, own_pieces(engine), {})
        saver.wait()
        for unit in engine.units:
            unit.unit.master.mul_(2)
    (folder / "run.toml").write_text(run.to_toml())
    return folder


def norm_weight(folder: Path) -> float:
    """Of an element that training starts at 1."""
    shape, weights = import_hf(folder)
    assert shape == SHAPE
    engine = build_engine(Run(model=shape), build_mesh(Layout(), torch.device("cpu")))
    slot = next(
        slot
        for unit in engine.units
        for slot in unit.unit.slots
        if slot.declaration.name == "norm.weight"
    )
    return weights(slot.declaration, slot.box)[0].item()


def test_a_run_becomes_a_folder_of_its_newest_checkpoint(run_folder, tmp_path, capsys):
    assert main(["convert", str(run_folder), str(tmp_path / "out")]) == 0
    assert norm_weight(tmp_path / "out") == 2.0
    out = capsys.readouterr().out
    assert f"{SHAPE.params():,} parameters after step 20" in out
    assert "transformers.LlamaForCausalLM.from_pretrained" in out


def test_one_checkpoint_of_a_run_can_be_named(run_folder, tmp_path, capsys):
    source = run_folder / "checkpoints" / "step-00000010"
    words = ["convert", str(source), str(tmp_path / "out"), "--precision", "bf16", "--json"]
    assert main(words) == 0
    assert norm_weight(tmp_path / "out") == 1.0
    document = json.loads(capsys.readouterr().out)
    assert document["step"] == 10
    assert document["parameters"] * 2 < document["bytes"] < document["parameters"] * 4


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(run_folder, tmp_path, capsys):
    shard = next((run_folder / "checkpoints" / "step-00000020").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["convert", str(run_folder), str(tmp_path / "out")]) == 0
    assert norm_weight(tmp_path / "out") == 1.0
    assert "step-00000020 is damaged" in capsys.readouterr().err


def test_what_is_no_run_is_said_in_one_line(tmp_path, capsys):
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is neither a run nor")
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_checkpoint_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(Run(model=SHAPE).to_toml())
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_a_converted_model_reaches_as_far_as_it_was_trained(run_folder, tmp_path, capsys):
    run = load_run(run_folder / "run.toml")
    longer = replace(run, recipe=replace(run.recipe, seq=4096))
    (run_folder / "run.toml").write_text(longer.to_toml())
    assert main(["convert", str(run_folder), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
