"""What the guides say works, works."""

import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from pages import ROOT

from phalanx.cli.main import main
from phalanx.core.model import ModelShape
from phalanx.trainer.model.families import LLAMA, Family
from phalanx.trainer.model.inventory import declarations

GUIDES = ROOT / "docs" / "guides"


def blocks(guide: str, language: str) -> list[str]:
    """The code blocks of one language."""
    text = (GUIDES / guide).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


def test_an_accelerator_of_ones_own_is_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (table,) = blocks("add-an-accelerator.md", "toml")
    Path("box.toml").write_text(table)
    (commands,) = blocks("add-an-accelerator.md", "")
    shown = ""
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        assert program == "phalanx"
        assert main(words) == 0, capsys.readouterr().err
        shown += capsys.readouterr().out
    assert "AcmeLink" in shown
    assert "no published run" in shown


def test_a_model_of_other_sizes_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (table,) = blocks("add-a-model-family.md", "toml")
    Path("mine.toml").write_text(table)
    assert main(["models", "mine.toml"]) == 0
    assert f"layers           {tomllib.loads(table)['layers']}" in capsys.readouterr().out


def test_a_family_of_other_names_finds_every_parameter():
    (code,) = blocks("add-a-model-family.md", "python")
    names: dict[str, Family] = {}
    exec(code, {"replace": replace, "LLAMA": LLAMA}, names)
    family = names["TOWER"]
    shape = ModelShape(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=40)
    config = family.configuration(shape)
    assert config["model_type"] == "tower"
    assert replace(family.shape(config), name=shape.name) == shape
    places = [
        place.name
        for declaration in declarations(shape)
        for place in family.places(declaration, shape)
    ]
    assert len(places) == len(set(places))
    assert "model.layers.1.mixer.query.weight" in places


def test_what_the_readme_says_of_python_is_true(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    planning = "\n".join(line for line in code.splitlines() if "phalanx.train(" not in line)
    planning = planning.replace("runs/demo", "tests/reports/recorded")
    names: dict[str, object] = {}
    exec(planning, names)
    assert names["sent"]
