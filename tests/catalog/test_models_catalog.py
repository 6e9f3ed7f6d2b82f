"""The models of the catalog: published counts come out, and names are forgiving."""

from pathlib import Path

import pytest

from phalanx.catalog import load
from phalanx.catalog.load import ModelEntry
from phalanx.core.errors import UsageError
from phalanx.core.model import ModelShape

ENTRIES = load.models()
NAMES = [entry.shape.name for entry in ENTRIES]


def last_digit(entry: ModelEntry) -> float:
    """One unit of the last digit of the published count: "1.7" billion knows no better."""
    text = (load.ROOT / "models" / f"{entry.shape.name}.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("params_b"))
    return 10.0 ** (9 - len(line.rstrip("0").partition(".")[2]))


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_the_published_parameter_count_comes_out(entry: ModelEntry):
    tolerance = max(0.007 * entry.published_params, last_digit(entry))
    assert abs(entry.shape.params() - entry.published_params) <= tolerance


def test_nearly_all_counts_come_out_within_0_7_percent():
    far = {
        entry.shape.name
        for entry in ENTRIES
        if abs(entry.shape.params() / entry.published_params - 1) > 0.007
    }
    # These are published to two digits, "1.7B": our counts are 1.652, 3.562, 1.745 and 31.475.
    assert far == {
        "megatron-gpt-1.7b",
        "megatron-gpt-3.6b",
        "megatron-readme-1.7b",
        "megatron-readme-32b",
    }


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.published_active], ids=lambda e: e.shape.name
)
def test_the_published_active_count_comes_out(entry: ModelEntry):
    active = entry.shape.active_params()
    if "leaves the input embedding out" in entry.notes:
        active -= entry.shape.embedding_params()
    assert active == pytest.approx(entry.published_active, rel=0.01)


def test_the_checkpoints_of_gpt_2_are_counted_to_the_last_parameter():
    counts = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-xl": 1_557_611_200}
    assert {name: load.model(name).params() for name in counts} == counts


def test_llama_3_2_1b_is_counted_to_the_last_parameter():
    assert load.model("llama-3.2-1b").params() == 1_235_814_400


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_every_model_names_its_source(entry: ModelEntry):
    assert entry.source


def test_every_family_is_there():
    kinds = {
        "dense": any(not e.shape.is_moe for e in ENTRIES),
        "experts": any(e.shape.is_moe for e in ENTRIES),
        "latent attention": any(e.shape.is_mla for e in ENTRIES),
        "tied": any(e.shape.tied for e in ENTRIES),
        "learned positions": any(e.shape.positions == "learned" for e in ENTRIES),
    }
    assert all(kinds.values())


@pytest.mark.parametrize("name", ["llama-3-8b", "Llama-3.1-8B", " llama_3.1_8b ", "LLAMA-3-8B"])
def test_aliases_and_spellings_mean_the_same_model(name: str):
    assert load.model(name).name == "llama-3.1-8b"


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(UsageError, match=r"unknown model 'llama-3-9b'; did you mean .*llama-3-8b"):
        load.model("llama-3-9b")


def test_a_name_cannot_leave_the_catalog():
    with pytest.raises(UsageError, match="unknown model"):
        load.model("../accelerators/h100-sxm")


def test_a_users_own_file_is_a_model(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text("layers = 2\nhidden = 64\nheads = 4\nvocab = 100\nparams_b = 0.0001\n")
    assert load.model(str(path)) == ModelShape(name="mine", layers=2, hidden=64, heads=4, vocab=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer = 2\n", "did you mean layers"),
        ("layers = 2.5\n", "whole number"),
        ("layers = true\n", "whole number"),
        ('norm = "batchnorm"\n', "rmsnorm, layernorm"),
        ("layers = \n", "is not TOML"),
        ("rope_theta = nan\n", "finite"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str, message: str):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load.model(str(path))


def test_a_missing_file_says_so(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot read"):
        load.model(str(tmp_path / "none.toml"))
