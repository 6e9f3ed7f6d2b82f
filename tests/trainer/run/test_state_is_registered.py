"""Everything that a run carries from step to step is in its checkpoints: nothing can be forgotten.

One test walks over all objects that an engine reaches: after a restore each holds what it held. The
other leaves out each part of a checkpoint in turn, and the run must notice or end elsewhere.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import edited
from trainer_jobs import small_run, train_job

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.core.run import Run
from phalanx.trainer.checkpoint import Checkpoint, Saver
from phalanx.trainer.engine.engine import Engine, build_engine
from phalanx.trainer.engine.step import train_step
from phalanx.trainer.parallel.mesh import build_mesh
from phalanx.trainer.run.continuity import Resume
from phalanx.trainer.run.state import own_pieces, progress, restore
from phalanx.trainer.run.text import open_text

MEASURED = re.compile(  # what is only measured, or lives within one step
    r"\.(recorder|ledger|_grads?|grad|_whole_grad|_now|_visits|load|_seen|seen|stats?|_passed|_filled"
    r"|_stays|_inputs|_outputs|_deferred|_ready|_leaving|_arriving|_next|_enabled|_in_flight|_held_back"
    r"|gradients)\b"
)
OURS = ("phalanx.", "torch.optim")


def leaves(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Every number, text and tensor that an object reaches, with the way to it."""
    if id(value) in seen or MEASURED.search(path):
        return
    if isinstance(value, torch.Tensor):
        yield path, value.detach().clone()
        return
    if value is None or isinstance(value, bool | int | float | str):
        yield path, value
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value.values())]
    elif isinstance(value, list | tuple | set | frozenset):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    elif type(value).__module__.startswith(OURS) and hasattr(value, "__dict__"):
        items = [(f"{path}.{name}", item) for name, item in vars(value).items()]
    else:
        return
    for way, item in items:
        yield from leaves(item, way, seen)


def held(engine: Engine) -> dict[str, Any]:
    return dict(leaves(engine, "engine", set()))


def different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    ways = [way for way in a.keys() | b.keys() if not same(a.get(way), b.get(way))]
    return sorted(ways)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        raw = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*raw)
    return type(a) is type(b) and bool(a == b)


def featured(run: Run, precision: str) -> Run:
    """A run in which everything that has a state has one that is not where it began."""
    model = replace(run.model, layers=2, experts=4, top_k=2, moe_ffn=16, dense_layers=1)
    recipe = replace(run.recipe, balance_speed=0.01, steps=8)
    layout = Layout.parse(f"mb=4 precision={precision}")
    return replace(run, model=model, recipe=recipe, layout=layout)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "book.txt").write_text("In the beginning was the word, a byte.\n" * 90)
    return small_run(tmp_path / "book.txt")


def built(run: Run) -> Engine:
    return build_engine(run, build_mesh(run.layout, torch.device("cpu")))


@pytest.mark.parametrize("precision", ["fp16", "fp8", "bf16"])
def test_what_an_engine_holds_after_some_steps_is_what_one_holds_that_took_it_up(
    run: Run, tmp_path: Path, precision: str
) -> None:
    run = featured(run, precision)
    engine, stream = built(run), open_text(run).training
    fresh = held(engine)
    for step in range(3):
        train_step(engine, step, stream.batch(step, engine.positions()))
        engine.spikes.note(2.0 + step, 0.5)
    engine.loss_scale.clean += 5 * engine.loss_scale.dynamic
    saver = Saver(tmp_path, 0, 1, attempt="a")
    saver.save(3, own_pieces(engine), progress(engine, 3, {}))
    saver.wait()
    other = built(run)
    assert len(different(fresh, held(engine))) > 20  # the steps have left their marks
    with Checkpoint.open(tmp_path / "step-00000003") as checkpoint:
        assert restore(other, checkpoint) == 3
    assert different(held(engine), held(other)) == []


Edit = Callable[[dict[str, Any]], None]


def without(key: str) -> Edit:
    return lambda state: state.pop(key)


def with_(key: str, value: Any) -> Edit:
    return lambda state: state.update({key: value})


SPIKED = {"history": [[0.001] * 20, [1e-9] * 20], "in_a_row": 0}
EDITS: dict[str, Edit] = {
    "step": without("step"),
    "updates": without("updates"),
    "another updates": with_("updates", 1),
    "loss_scale": without("loss_scale"),
    "amax_steps": with_("amax_steps", 0),
    "spikes": with_("spikes", SPIKED),
    "skips": with_("skips", [[4, 3]]),
    "corpus": with_("corpus", "another"),
    "seed": with_("seed", 7),
    "batch": with_("batch", 4),
    "seq": with_("seq", 8),
    "offset": with_("offset", 3),
    "separator": with_("separator", 9),
    "token_dtype": with_("token_dtype", "int64"),
    "document_mask": with_("document_mask", True),
    "validation": with_("validation", 0.5),
    "schedule": with_("schedule", {}),
}
ONLY_TOLD = {"layout", "corpus_name", "fence"}  # what no later step depends on


def outcome(run: Run, folder: Path) -> Any:
    """Where a run ends that goes on from what is there: its losses, or what it is refused with."""
    try:
        trained = train_job(run, folder, Resume())
    except PhalanxError as error:
        return f"{type(error).__name__}: {error}"
    told = [text for text in trained.events if "was " in text or "damaged" in text]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return trained.losses, [line["loss_scale"] for line in lines], told


@pytest.fixture
def half(run: Run, tmp_path: Path) -> tuple[Run, Path]:
    """A run that has come half its way, with every kind of state."""
    run = featured(run, "fp16")
    folder = tmp_path / "half"
    folder.mkdir()
    train_job(replace(run, recipe=replace(run.recipe, stop_at=4)), folder)
    return run, edited(folder, tmp_path / "base", with_("loss_scale", [2.0**14, 3]))


def test_every_part_of_a_checkpoint_matters(half: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = half
    path = folder / "checkpoints" / "step-00000004"
    state = json.loads((path / "manifest.json").read_text())["state"]
    edits = {name.removeprefix("another ") for name in EDITS}
    assert set(state) == edits | ONLY_TOLD, "say here what a new key of a checkpoint is good for"
    undisturbed = outcome(run, edited(folder, tmp_path / "undisturbed", lambda state: None))
    assert all(map(math.isfinite, undisturbed[0]))
    unnoticed = [
        name
        for i, (name, edit) in enumerate(EDITS.items())
        if outcome(run, edited(folder, tmp_path / str(i), edit)) == undisturbed
    ]
    assert unnoticed == ["amax_steps"]  # of formats that fp16 is not; held above
