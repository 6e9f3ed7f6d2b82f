import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.api.runfile import default_layout, load_run
from phalanx.catalog import load
from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run

WEIGHTS = Path(__file__).parents[1] / "trainer" / "model" / "data" / "qwen3"
FILE = """
layout = "dp=2 tp=2 mb=2"
[model]
layers = 6
hidden = 128
[recipe]
steps = 7
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_without_a_file_four_ranks_of_the_cpu_are_cut_along_two_axes() -> None:
    assert load_run() == Run(layout=Layout(pp=2, tp=2))


def test_without_a_layout_every_gpu_gets_a_rank() -> None:
    assert load_run(gpus=lambda: 8).layout == Layout(dp=8)


def test_gpus_are_not_counted_where_somebody_gave_a_layout(run_file: Path) -> None:
    def refuse() -> int:
        raise AssertionError("counted")

    assert load_run(run_file, gpus=refuse).layout == Layout(dp=2, tp=2, mb=2)
    assert load_run(layout="dp=3", gpus=refuse).layout == Layout(dp=3)


def test_values_of_the_file_are_kept_and_the_rest_has_its_default(run_file: Path) -> None:
    run = load_run(run_file)
    assert (run.model.layers, run.model.hidden, run.recipe.steps) == (6, 128, 7)
    assert run.recipe.batch == Recipe().batch


def test_a_layout_on_the_command_line_stands_instead_of_the_files(run_file: Path) -> None:
    assert load_run(run_file, layout="pp=2").layout == Layout(pp=2)


def test_one_key_of_the_layout_can_be_set_alone(run_file: Path) -> None:
    run = load_run(run_file, sets=["layout.mb=4", "layout.sp=off", "layout.tp=1"])
    assert run.layout == Layout(dp=2, tp=1, mb=4, sp=False)
    assert load_run(sets=["layout.mb=4"]).layout == Layout(pp=2, tp=2, mb=4)


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("recipe.learning_rate=3e-4", "recipe", "learning_rate", 3e-4),
        ("recipe.steps = 1_000", "recipe", "steps", 1000),
        ("recipe.clip_norm=inf", "recipe", "clip_norm", math.inf),
        ("recipe.decay=linear", "recipe", "decay", "linear"),
        ('recipe.decay="linear"', "recipe", "decay", "linear"),
        ("model.tied=true", "model", "tied", True),
        ("data.document_mask=false", "data", "document_mask", False),
        ("data.path=my text=1.txt", "data", "path", "my text=1.txt"),
        ("data.path=2026-01-31", "data", "path", "2026-01-31"),
        ("layout.stages=[1, 3]", "layout", "stages", (1, 3)),
        ("layout.stages=1+3", "layout", "stages", (1, 3)),
    ],
)
def test_a_set_value_is_toml_or_a_bare_word(
    text: str, section: str, key: str, value: object
) -> None:
    assert getattr(getattr(load_run(layout="pp=2", sets=[text]), section), key) == value


def test_the_last_of_two_sets_counts() -> None:
    assert load_run(sets=["recipe.steps=1", "recipe.steps=2"]).recipe.steps == 2


def test_the_corpus_has_a_flag_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_text("Once.")
    monkeypatch.chdir(tmp_path)
    assert load_run(data="book.txt").data.path == str(tmp_path / "book.txt")
    assert load_run(data="missing.txt").data.path == "missing.txt"


def test_every_path_of_a_run_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").touch()
    (tmp_path / "disk").mkdir()
    sets = ("layout.schedule=rows.csv", "data.offload_folder=disk")
    run = load_run(layout="pp=2", sets=sets)
    assert run.layout.schedule == str(tmp_path / "rows.csv")
    assert run.data.offload_folder == str(tmp_path / "disk")
    assert load_run(layout="pp=2 schedule=gone.csv").layout.schedule == "gone.csv"


def test_a_catalog_name_brings_its_sizes_and_own_keys_stand_over_them() -> None:
    shape = load_run(sets=["model.name=llama-3.1-8b", "model.layers=2"]).model
    assert (shape.layers, shape.hidden) == (2, load.model("llama-3.1-8b").hidden)


def test_every_catalog_model_survives_its_run_file(tmp_path: Path) -> None:
    for entry in load.models():
        run = load_run(sets=[f"model.name={entry.shape.name}"], layout="dp=1")
        path = tmp_path / "again.toml"
        path.write_text(run.to_toml())
        assert load_run(path) == run


def test_a_model_in_a_file_of_its_own_survives_its_run_file(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("layers = 3\nhidden = 96\nheads = 3\n")
    run = load_run(sets=[f"model.name={own}"])
    assert run.model == ModelShape(layers=3, hidden=96, heads=3)
    path = tmp_path / "again.toml"
    path.write_text(run.to_toml())
    assert load_run(path) == run


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["recipe.stpes=3"], "did you mean steps"),
        (["recpie.steps=3"], "did you mean recipe"),
        (["layout.shedule=gpipe"], "did you mean schedule"),
        (["layout.schedule=zigzag"], "unknown schedule"),
        (["model.name=llama-3.1-8bb"], "did you mean llama-3.1-8b"),
        (["recipe.steps=many"], "a whole number"),
        (["steps=3"], "write section.key=value"),
        (["recipe.steps"], "write section.key=value"),
        (["recipe.steps="], "write section.key=value"),
    ],
)
def test_a_wrong_set_says_what_would_be_right(sets: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_run(sets=sets)


@pytest.mark.parametrize(
    "text", ["x = [", "\xff", "model = 3", "layout = 3", "layout = 'tp=2 tp=4'"]
)
def test_a_broken_file_is_a_mistake_of_usage(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError):
        load_run(path, sets=["model.layers=4"])


def test_a_missing_file_is_answered_with_the_nearest(tmp_path: Path, run_file: Path) -> None:
    with pytest.raises(UsageError, match=f"did you mean {run_file}"):
        load_run(tmp_path / "urn.toml")
    with pytest.raises(UsageError, match="no run file"):
        load_run(tmp_path / "nowhere" / "run.toml")


def test_ranks_that_contradict_the_layout_are_refused_with_the_product(run_file: Path) -> None:
    with pytest.raises(RefusedError, match=r"2 x 1 x 1 x 2 = 4 ranks, not for 8"):
        load_run(run_file, ranks=8)
    assert load_run(run_file, ranks=4).layout.ranks == 4
    with pytest.raises(UsageError, match="--ranks is 0"):
        load_run(ranks=0)


@given(
    ranks=st.integers(1, 64),
    batch=st.integers(1, 64),
    heads=st.sampled_from([1, 2, 3, 4, 8, 12]),
    on_gpus=st.booleans(),
)
def test_a_default_layout_uses_every_rank_and_divides_batch_and_heads(
    ranks: int, batch: int, heads: int, on_gpus: bool
) -> None:
    shape = ModelShape(layers=64, hidden=24 * heads, heads=heads)
    run = Run(model=shape, recipe=Recipe(batch=batch))
    layout = Layout.from_mapping(default_layout(ranks, run, on_gpus))
    assert layout.ranks == ranks
    assert batch % layout.dp == 0
    assert heads % layout.tp == 0


def test_the_demo_is_a_run_file() -> None:
    path = Path(__file__).parents[2] / "examples" / "demo.toml"
    run = load_run(path)
    assert run.layout.ranks == 4
    assert Run.from_tables(tomllib.loads(run.to_toml())) == run


def test_a_folder_of_weights_says_what_the_model_is():
    run = load_run(sets=[f"model.weights={WEIGHTS}"], layout="dp=1")
    assert (run.model.layers, run.model.hidden, run.model.qk_norm) == (4, 16, True)
    assert run.weights == str(WEIGHTS)
    assert Run.from_tables(tomllib.loads(run.to_toml())) == run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.hidden=64", "model.hidden is 64, and in .*qwen3 it is 16; leave out model.hidden"),
        ("model.name=llama-3.2-1b", "model.weights says what the model is; leave out model.name"),
        ("model.weights=/nowhere", "cannot read /nowhere/config.json"),
        ("model.weights=3", "model.weights is 3; it is a folder"),
    ],
)
def test_what_contradicts_a_folder_of_weights_is_refused(change: str, message: str):
    with pytest.raises(UsageError, match=message):
        load_run(sets=[f"model.weights={WEIGHTS}", change], layout="dp=1")


def test_a_run_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILE, encoding="utf-8-sig")
    assert load_run(tmp_path / "run.toml").recipe.steps == 7


def test_a_folder_whose_name_is_not_utf_8_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad\udcff").mkdir()
    (tmp_path / "bad\udcff" / "book.txt").write_text("text")
    monkeypatch.chdir(tmp_path / "bad\udcff")
    with pytest.raises(UsageError, match="is not text in UTF-8; rename its folder"):
        load_run(data="book.txt")
