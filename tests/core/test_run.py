"""A run file is read key by key: what it says is what is run, and what is wrong is named."""

import math
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UsageError
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Data, Decay, Recipe, Run


def read(text: str) -> Run:
    return Run.from_tables(tomllib.loads(text))


def test_a_written_run_file_reads_back_to_the_same_run() -> None:
    run = Run(
        model=ModelShape(name="x", layers=6, hidden=128, heads=8, kv_heads=2, tied=True),
        layout=Layout.parse("dp=2 tp=2 pp=2 zero=3 stages=2+4 shard=1"),
        recipe=Recipe(clip_norm=math.inf, decay="linear", optimizer="sgd"),
        data=Data(path='a "quoted"\\path', document_mask=True),
        cluster="h100x16",
    )
    assert read(run.to_toml()) == run


@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=20))
def test_any_path_survives_the_run_file(path: str) -> None:
    run = Run(data=Data(path=path))
    assert read(run.to_toml()) == run


def test_a_saved_layout_keeps_its_meaning_when_a_degree_changes() -> None:
    tables: dict[str, Any] = tomllib.loads(Run(layout=Layout(dp=2)).to_toml())
    tables["layout"] |= {"dp": 4, "tp": 2}
    assert Run.from_tables(tables).layout == Layout(dp=4, tp=2)


def test_the_layout_may_be_one_line() -> None:
    assert read('layout = "dp=2 tp=2"').layout == Layout(dp=2, tp=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[modle]\nlayers = 2", "did you mean model"),
        ("[model]\nlayer = 2", "did you mean layers"),
        ("[recipe]\nlearningrate = 1", "did you mean learning_rate"),
        ("[recipe]\nlr = 1", "'lr'; did you mean learning_rate"),
        ("[recipe]\nGrad-Clip = 1", "did you mean clip"),
        ("[recipe]\nhidden_size = 1", "did you mean model.hidden"),
        ("[model]\nseq = 1", "did you mean recipe.seq"),
        ("[layout]\nbsz = 1", "did you mean recipe.batch"),
        ('layout = "tensor_parallel=2"', "did you mean tp"),
        ("[training]\nlr = 1", "did you mean recipe"),
        ("[recipe]\nkeep = 0", "at least 1"),
        ("[recipe]\ndecay_from = 5", "within recipe.warmup=10; it can be 10 or more"),
        ("[model]\nlayers = 2.5", "whole number"),
        ("[model]\nlayers = true", "whole number"),
        ("[model]\ntied = 1", "true or false"),
        ('[model]\nnorm = "batch"', "rmsnorm, layernorm"),
        ("[model]\nlayers = 0", "at least 1"),
        ("[recipe]\nlearning_rate = nan", "is nan"),
        ("[recipe]\nlearning_rate = inf", "finite"),
        ("[recipe]\nsteps = -1", "at least 1"),
        ("[recipe]\nbeta1 = 1.0", r"\[0, 1\)"),
        ("[recipe]\nclip_norm = 1", "2 or inf"),
        ("model = 3", "table of keys"),
        ("cluster = 3", "h100x64"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_do(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(text)


def test_a_whole_number_may_stand_for_a_number() -> None:
    assert read("[recipe]\nlearning_rate = 1").recipe.learning_rate == 1.0
    assert read("[recipe]\nsteps = 1e3").recipe.steps == 1000


def test_the_learning_rate_warms_up_in_a_line_and_is_at_its_floor_in_the_last_step() -> None:
    recipe = Recipe(steps=111, warmup=10, learning_rate=1.0, min_learning_rate=0.1)
    assert recipe.learning_rate_at(0) == pytest.approx(0.1)
    assert recipe.learning_rate_at(9) == recipe.learning_rate_at(10) == pytest.approx(1.0)
    assert recipe.learning_rate_at(60) == pytest.approx(0.55)
    assert recipe.learning_rate_at(109) > 0.1
    assert recipe.learning_rate_at(110) == pytest.approx(0.1)
    assert recipe.learning_rate_at(10**6) == pytest.approx(0.1)


@given(
    steps=st.integers(2, 300),
    warmup=st.integers(0, 298),
    decay=st.sampled_from(["cosine", "linear"]),
)
def test_the_last_step_learns_at_the_floor(steps: int, warmup: int, decay: Decay) -> None:
    recipe = Recipe(steps=steps, warmup=min(warmup, steps - 2), decay=decay, learning_rate=2.0)
    assert recipe.learning_rate_at(steps - 1) == pytest.approx(0.2)


def test_a_decay_of_one_step_stays_at_the_peak() -> None:
    assert Recipe(steps=1, warmup=0, learning_rate=1.0).learning_rate_at(0) == 1.0


def test_linear_and_constant_decay_are_what_they_say() -> None:
    recipe = Recipe(steps=101, warmup=0, learning_rate=1.0, min_learning_rate=0.0, decay="linear")
    assert recipe.learning_rate_at(25) == pytest.approx(0.75)
    assert replace(recipe, decay="constant").learning_rate_at(99) == 1.0


def test_a_learning_rate_stays_at_its_peak_until_its_decay_begins() -> None:
    recipe = Recipe(steps=101, warmup=10, learning_rate=1.0, decay="linear", decay_from=51)
    assert recipe.learning_rate_at(10) == recipe.learning_rate_at(50) == 1.0
    assert recipe.learning_rate_at(51) == 1.0
    assert recipe.learning_rate_at(100) == pytest.approx(0.1)


@given(rate=st.floats(0, 1), decay=st.sampled_from(["cosine", "linear", "constant"]))
def test_a_decay_goes_on_from_the_learning_rate_it_is_told(rate: float, decay: Decay) -> None:
    recipe = Recipe(
        steps=200, warmup=0, learning_rate=1.0, decay=decay, decay_from=100, decay_from_rate=rate
    )
    assert recipe.learning_rate_at(100) == pytest.approx(rate)
    ending = rate if decay == "constant" else min(rate, 0.1)
    assert recipe.learning_rate_at(199) == pytest.approx(ending)


def test_a_run_stops_at_the_earlier_of_its_two_ends() -> None:
    assert Recipe(steps=20).last_step == 20
    assert Recipe(steps=20, stop_at=10).last_step == 10
    assert Recipe(steps=20, stop_at=30).last_step == 20


@pytest.mark.parametrize(
    ("values", "says"),
    [({"optimizer": "sgdx"}, "it can be adamw, sgd"), ({"seq": 4096.5}, "whole number")],
)
def test_a_recipe_checks_its_words_and_numbers_in_python_too(
    values: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Recipe(**values)
