"""Messages of a table of layouts are, row by row, those of each layout alone."""

from dataclasses import replace

import numpy as np
import pytest
from drawn_runs import drawn_runs

from phalanx.core.layout import Coordinates, Layout
from phalanx.core.model import ModelShape
from phalanx.core.precision import Precision
from phalanx.core.run import Recipe
from phalanx.cost.messages import messages, setting, times_in_step
from phalanx.cost.messages.unit import UnitMessage
from phalanx.cost.table import Integers, Table
from phalanx.schedules.layouts import num_stages

LLAMA = ModelShape(layers=12, hidden=96, heads=12, kv_heads=2, ffn=130, vocab=97)
LATENT = replace(
    LLAMA, kv_heads=12, q_lora_rank=24, kv_lora_rank=20, qk_nope=12, qk_rope=6, v_head=14
)
MODELS = {
    "llama": (LLAMA, "bf16"),
    "tied": (replace(LLAMA, tied=True, positions="learned"), "fp32"),
    "latent": (LATENT, "fp8-current"),
    "experts": (replace(LLAMA, experts=12, top_k=2, moe_ffn=40, dense_layers=2), "fp8"),
    "deepseek": (
        replace(LATENT, experts=12, top_k=4, moe_ffn=42, shared_experts=1, dense_layers=1),
        "mxfp8",
    ),
}
LAYOUTS = [replace(run.layout, stages=()) for run in drawn_runs(320, max_ranks=64, seed=1)]
LAYOUTS = [layout for layout in LAYOUTS if num_stages(layout) <= LLAMA.layers]


def key(message: UnitMessage) -> tuple[object, ...]:
    """All but the columns."""
    return (
        *(message.axis, message.among, message.collective, message.purpose, message.when),
        *(message.unit, message.share, message.behind, message.together),
    )


def rows_of(shape: ModelShape, layouts: list[Layout], at: Coordinates) -> list[dict[object, int]]:
    """Bytes and times of every kind of message, of every row that sends it."""
    table = Table.of(shape, Recipe(seq=96, batch=720720, dropout=0.1, balance_loss=0.1), layouts)
    where = setting(table, at)
    found: list[dict[object, int]] = [{} for _ in layouts]
    for message in messages(where):
        step = times_in_step(message, where.held, table.m)
        columns = np.broadcast_arrays(message.bytes, message.times, step, table.tp)
        for row, (size, times, often, _) in enumerate(zip(*columns, strict=True)):
            if times:
                kind = (key(message), int(size), int(often))
                found[row][kind] = found[row].get(kind, 0) + int(times)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("at", [Coordinates(0, 0, 0, 0), Coordinates(0, 1, 1, 1)])
def test_a_row_of_many_sends_what_it_sends_alone(name: str, at: Coordinates):
    shape, precision = MODELS[name]
    layouts = [replace(each, precision=Precision.parse(precision)) for each in LAYOUTS]
    if not shape.is_moe:
        layouts = [replace(layout, ep=1) for layout in layouts]
    together = rows_of(shape, layouts, at)
    for layout, found in zip(layouts, together, strict=True):
        assert [found] == rows_of(shape, [layout], at), layout


def test_rows_may_meet_columns_of_another_axis():
    layouts = [Layout.parse(f"dp=8 pp=2 tp={tp} precision=bf16") for tp in (1, 2, 4)]
    stages, recipe = (0, 1, 2, 3), Recipe(seq=96, batch=48)
    rows = Table.of(LLAMA, recipe, layouts).take(np.arange(len(layouts))[:, None])
    tall = replace(rows, zero=np.array([stages]))
    each = [replace(layout, zero=zero) for layout in layouts for zero in stages]
    assert (
        _bytes_of_all(tall).ravel().tolist()
        == _bytes_of_all(Table.of(LLAMA, recipe, each)).tolist()
    )


def _bytes_of_all(table: Table) -> Integers:
    where, total = setting(table), np.zeros_like(table.tp * table.zero)
    for message in messages(where):
        total = total + message.bytes * times_in_step(message, where.held, table.m)
    return total
