"""What the pipeline axis refuses: layers, ranks and micro-batches that do not suit the schedule."""

from collections.abc import Callable, Iterator

import numpy as np

from phalanx.core.errors import shorten
from phalanx.core.layout import DEFAULT_SCHEDULE, Layout
from phalanx.core.run import Run
from phalanx.cost.refusals.rule import Rule, Scope, keys, said
from phalanx.cost.table import Booleans, Integers, Table
from phalanx.schedules.check import check
from phalanx.schedules.file import refuse_early_embedding
from phalanx.schedules.layouts import chunks, layers_of_stages, spec_of
from phalanx.schedules.registry import NAMES, SPECS, find_schedule
from phalanx.schedules.sizes import Sizes
from phalanx.schedules.spec import ScheduleSpec

ENDLESS = np.iinfo(np.int64).max


def _outside(
    x: Table, sizes_of: Callable[[ScheduleSpec, int], Sizes], number: Integers
) -> Booleans:
    """Where a number is none that the schedule takes; which those are may depend on p."""
    ranks, place = np.unique(x.pp, return_inverse=True)
    specs = [find_schedule(name) for name in x.schedule.values]
    sizes = [[sizes_of(spec, int(p)) for p in ranks] for spec in specs]
    numbers = [(s.least, s.multiple, s.most or ENDLESS) for row in sizes for s in row]
    table = np.array(numbers, dtype=np.int64).reshape(len(specs), len(ranks), 3)
    least, multiple, most = np.moveaxis(table[x.schedule.codes, place.reshape(x.pp.shape)], -1, 0)
    fewest = np.minimum(np.maximum(-(-number // multiple) * multiple, least), most)
    result: Booleans = fewest != number
    return result


def _says_size(key: str, size: int, sizes: Sizes, others: str, layout: Layout) -> str:
    return (
        f"schedule={layout.schedule} needs {key} to be {sizes}, not {key}={size}; use "
        f"{key}={sizes.nearest(size)}, or schedule={others}"
    )


def _says_ranks(run: Run) -> str:
    layout = run.layout
    others = f"{DEFAULT_SCHEDULE} with v=1"
    return _says_size("pp", layout.pp, spec_of(layout).ranks, others, layout)


def _says_chunks(run: Run) -> str:
    """With the schedules that have so many chunks on so many ranks."""
    layout, v = run.layout, chunks(run.layout)
    takes = (s.name for s in SPECS if s.chunks.hold(v) and s.ranks.hold(layout.pp))
    others = " or ".join(takes) or f"{DEFAULT_SCHEDULE} with v=1"
    return _says_size("v", v, spec_of(layout).chunks, others, layout)


def _says_micro_batches(run: Run) -> str:
    layout = run.layout
    sizes = spec_of(layout).micro_batches(layout.pp)
    fits = [sizes.fewest(1)]
    while len(fits) < 5 and not sizes.fixed:
        fits.append(sizes.fewest(fits[-1] + 1))
    unit = layout.dp * layout.mb
    return (
        f"schedule={layout.schedule} on pp={layout.pp} needs the number of micro-batches to be "
        f"{sizes}, and there are {run.micro_batches}; the batch can be "
        f"{shorten([unit * fit for fit in fits], 4)}"
    )


def _unfilled(x: Table) -> Booleans:
    """Where layers do not fill the stages, or not as the layout names them."""
    layers, stages = x.model.layers, x.pp * x.v
    named = x.stages.test(bool)
    other = x.stages.pick(len) != stages
    odd = x.stages.test(lambda s: sum(s) != layers or min(s, default=0) < 0 or 0 in s[1:-1])
    return np.where(named, other | odd, stages > layers)


def _foreign(x: Table) -> Booleans:
    """Where a schedule from elsewhere has rows that cannot be obeyed."""
    foreign = x.schedule.test(lambda name: name not in NAMES)
    clashes = np.zeros(np.broadcast_shapes(foreign.shape, x.m.shape), dtype=np.bool_)
    if not foreign.any():
        return clashes
    columns = np.broadcast_arrays(foreign, x.schedule.codes, x.pp, x.m, x.v)
    for at in zip(*np.nonzero(columns[0]), strict=True):
        code, p, m, v = (int(column[at]) for column in columns[1:])
        clashes[at] = bool(_objection(x.schedule.values[code], p, m, v, tied=x.model.tied))
    return clashes


def _objection(name: str, p: int, m: int, v: int, *, tied: bool) -> str:
    """Why the rows of a schedule cannot be obeyed; empty where they can."""

    def prove() -> None:
        schedule = find_schedule(name).build(p, m, v)
        check(schedule)
        if tied:
            refuse_early_embedding(schedule)

    return said(prove)


def _says_foreign(run: Run) -> str:
    layout = run.layout
    p, m, v = layout.pp, run.micro_batches, chunks(layout)
    return _objection(layout.schedule, p, m, v, tied=run.model.tied)


def _asynchronous(x: Table) -> Booleans:
    return x.schedule.test(lambda name: find_schedule(name).asynchronous)


def _splits(x: Table) -> Booleans:
    return x.schedule.test(lambda name: find_schedule(name).splits_backward)


def _alone(
    reason: str,
    more: str,
    clashes: Callable[[Table], Booleans | bool],
    says: Callable[[Run], tuple[str, str]],
) -> Rule:
    """A rule about stages that never meet: what needs all of them at one time cannot be had."""

    def sentence(run: Run) -> str:
        needs, instead = says(run)
        return (
            f"schedule={run.layout.schedule} moves each stage by itself, but {needs}; "
            f"use {instead}, or schedule={DEFAULT_SCHEDULE}"
        )

    return Rule(
        f"asynchronous stages: {reason}",
        keys(f"schedule {more}"),
        lambda x: _asynchronous(x) & clashes(x),
        sentence,
        Scope.OURS,
    )


def _of_asynchronous() -> Iterator[Rule]:
    """Under PipeDream stages never meet."""
    yield _alone(
        "clipping",
        "",
        lambda x: x.recipe.clip > 0,
        lambda run: (
            f"recipe.clip={run.recipe.clip:g} needs the norm of all stages",
            "recipe.clip=0",
        ),
    )
    yield _alone(
        "optimistic updates",
        "optimistic",
        lambda x: x.optimistic,
        lambda run: ("optimistic=on needs a norm to wait for", "optimistic=off"),
    )
    yield _alone(
        "ZeRO-2 and 3",
        "zero shard cp",
        lambda x: x.zero_stage >= 2,
        lambda run: (f"zero={run.layout.zero} lets go of what it stashes", "zero=1"),
    )
    yield _alone(
        "tied tables",
        "pp",
        lambda x: (x.pp > 1) & x.model.tied,
        lambda run: ("a tied table moves on both ends", "model.tied=false"),
    )
    yield _alone(
        "experts",
        "",
        lambda x: x.model.is_moe,
        lambda run: ("experts are balanced once a step", "model.experts=0"),
    )
    yield _alone(
        "scales",
        "precision",
        lambda x: bool(x.precision.recipe) or x.precision.rest == "fp16",
        lambda run: (
            f"precision={run.layout.precision} has scales that all stages agree on",
            "precision=bf16",
        ),
    )


RULES = (
    Rule(
        "the schedule takes other numbers of ranks",
        keys("pp schedule"),
        lambda x: _outside(x, lambda spec, p: spec.ranks, x.pp),
        _says_ranks,
    ),
    Rule(
        "the schedule takes other numbers of chunks",
        keys("pp schedule v"),
        lambda x: _outside(x, lambda spec, p: spec.chunks, x.v),
        _says_chunks,
    ),
    Rule(
        "the schedule takes other numbers of micro-batches",
        keys("dp pp mb schedule"),
        lambda x: _outside(x, lambda spec, p: spec.micro_batches(p), x.m),
        _says_micro_batches,
    ),
    Rule(
        "the rows of the schedule cannot be obeyed",
        keys("dp pp mb schedule v"),
        _foreign,
        _says_foreign,
    ),
    Rule(
        "more stages than layers",
        keys("pp schedule v stages"),
        _unfilled,
        lambda run: said(lambda: layers_of_stages(run.layout, run.model.layers)),
    ),
    Rule(
        "a stage without layers",
        keys("stages"),
        lambda x: x.stages.test(lambda s: 0 in s),
        lambda run: (
            f"stages={'+'.join(map(str, run.layout.stages))}: the trainer needs a block in every "
            "stage; give the first and the last at least 1"
        ),
        Scope.OURS,
    ),
    Rule(
        "a compiled block does both halves of its backward at once",
        keys("schedule compile"),
        lambda x: _splits(x) & x.compile,
        lambda run: (
            f"schedule={run.layout.schedule} splits the backward, which a compiled block does at "
            f"once; use compile=off, or schedule={DEFAULT_SCHEDULE}"
        ),
        Scope.OURS,
    ),
    *_of_asynchronous(),
    Rule(
        "asynchronous stages: weights stay on the device",
        keys("schedule offload reshard"),
        lambda x: _asynchronous(x) & (x.offload.test(bool) | ~x.reshard),
        lambda run: (
            f"schedule={run.layout.schedule} stashes weights on the device, and moves them at "
            f"every micro-batch; use schedule={DEFAULT_SCHEDULE}, or offload=none reshard=on"
        ),
        Scope.OURS,
    ),
)
