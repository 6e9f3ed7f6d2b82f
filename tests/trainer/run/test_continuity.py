"""A resume knows what makes it the same run, and names what is another."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.run import Data, Decay, Recipe, Run
from phalanx.data.corpus import open_corpus
from phalanx.trainer.run.continuity import (
    changes,
    identity,
    learning_rate_jump,
    refuse_changes,
    require_steps,
)

RECIPE = Recipe(steps=100, warmup=10, learning_rate=1e-3)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    path = tmp_path / "ids.bin"
    path.write_bytes(bytes(range(1, 201)) * 20)
    return Run(recipe=RECIPE, data=Data(path=str(path), token_dtype="uint8"))


def identity_of(run: Run) -> dict[str, object]:
    return identity(run, open_corpus(run.data, run.model.vocab))


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("data", "validation", 0.2),
        ("data", "separator", 7),
        ("data", "document_mask", True),
        ("data", "offset", 100),
        ("recipe", "seed", 1),
        ("recipe", "seq", 128),
        ("recipe", "batch", 8),
    ],
)
def test_what_decides_the_samples_is_refused_by_name(
    run: Run, table: str, key: str, value: object
) -> None:
    before = identity_of(run)
    other = replace(run, **{table: replace(getattr(run, table), **{key: value})})
    found = changes(before, identity_of(other))
    assert f"{table}.{key}" in [change.key for change in found]
    shown = getattr(getattr(run, table), key)
    with pytest.raises(RefusedError, match=r"--from here --name NAME, or .* --force$"):
        refuse_changes(found, "here")
    assert any(f"{table}.{key} was {shown} and is {value}: " in str(c) for c in found)


def test_another_width_and_another_text_are_named(run: Run) -> None:
    before = identity_of(run)
    data = replace(run.data, token_dtype="uint16", trust=True)
    wide = replace(run, model=replace(run.model, vocab=65536), data=data)
    assert {c.key for c in changes(before, identity_of(wide))} == {
        "the corpus",
        "data.token_dtype",
    }
    more = Path(run.data.path).with_name("more.bin")
    more.write_bytes(Path(run.data.path).read_bytes() + b"1")
    (change,) = changes(before, identity_of(replace(run, data=replace(run.data, path=str(more)))))
    assert str(change).startswith("the corpus was ids.bin as uint8 and is more.bin as uint8: ")


def test_the_same_run_is_not_refused(run: Run) -> None:
    assert changes(identity_of(run), identity_of(run)) == []
    refuse_changes([], "here")
    moved = Path(run.data.path).rename(Path(run.data.path).with_name("moved.bin"))
    later = replace(
        run, recipe=replace(run.recipe, steps=200), data=replace(run.data, path=str(moved))
    )
    assert changes(identity_of(replace(run, data=later.data)), identity_of(later)) == []


def test_a_finished_run_with_more_steps_is_told_that_its_learning_rate_jumps(run: Run) -> None:
    state = {**identity_of(run), "step": 100}
    line = learning_rate_jump(state, replace(RECIPE, steps=200))
    assert line.startswith("the learning rate goes from 0.0001 to 0.000")
    assert "since recipe.steps was 100 and is 200; it goes on smoothly with --set" in line


@given(
    step=st.integers(10, 100),
    steps=st.integers(110, 400),
    decay=st.sampled_from(["cosine", "linear"]),
)
def test_what_is_proposed_goes_on_smoothly_to_the_floor(
    step: int, steps: int, decay: Decay
) -> None:
    before = replace(RECIPE, decay=decay)
    schedule = {key: getattr(before, key) for key in identity_keys()}
    longer = replace(before, steps=steps)
    line = learning_rate_jump({"step": step, "schedule": schedule}, longer)
    if "--set" in line:
        begin, rate = (word.rpartition("=")[2] for word in line.split(" --set ")[1:])
        longer = replace(longer, decay_from=int(begin), decay_from_rate=float(rate))
    now, was = longer.learning_rate_at(step), before.learning_rate_at(step)
    assert now == pytest.approx(was, rel=0.011)
    assert learning_rate_jump({"step": step, "schedule": schedule}, longer) == ""
    assert longer.learning_rate_at(steps - 1) == pytest.approx(1e-4, rel=1e-3)


def identity_keys() -> tuple[str, ...]:
    from phalanx.trainer.run.continuity import SCHEDULE

    return SCHEDULE


def test_an_older_checkpoint_that_says_less_is_believed(run: Run) -> None:
    assert changes({"seed": 0, "step": 3}, identity_of(run)) == []
    assert learning_rate_jump({"seed": 0, "step": 3}, run.recipe) == ""


def test_a_run_that_ends_before_its_checkpoint_is_refused() -> None:
    with pytest.raises(UsageError, match=r"of step 101, and recipe\.steps=100 ends before it"):
        require_steps(RECIPE, 101)
    assert require_steps(RECIPE, 100) == "all 100 steps are done; more need recipe.steps above 100"
    assert require_steps(RECIPE, 99) == ""
