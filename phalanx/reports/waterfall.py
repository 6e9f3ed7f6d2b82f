"""A step from the peak to what was achieved: measured terms that add up to it, planned ones beside.

    step = arithmetic at the peak + recomputation + what computing took longer than both
         + standing still for messages, by axis (along the pipeline: bubble and messages)
         + waiting for batches + optimizer + work around messages + what no span explains

Every term is the mean over ranks of what each rank's own clock says, over the steps whose windows
are counted (see trainer/run/shares.py).
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.planner.simulate import occupancy, simulate
from phalanx.reports.planned import RunPlan
from phalanx.reports.record import RunRecord, number
from phalanx.reports.term import ReportTerm
from phalanx.schedules.build import build
from phalanx.schedules.layouts import chunks

AT_PEAK = "arithmetic at the peak"
RECOMPUTED = "recomputation at the peak"
BELOW = "below the peak"
ARITHMETIC = "arithmetic"  # where no peak is known
EXPOSED = "exposed messages: "
BUBBLE = "bubble: "
DATA, OPTIMIZER, AROUND, REST = "data wait", "optimizer", "around messages", "rest"
AXES = ("tensor", "context", "expert", "data", "pipeline", "world")
_MOST_ACTIONS = 20_000  # of a schedule that is played to find its bubble
_WHY = {
    AT_PEAK: "needed FLOP over the peak: MFU of the step",
    RECOMPUTED: "FLOP that are done again over the peak: HFU less MFU",
    BELOW: "what computing took longer: products, attention, passes over memory, launches",
    ARITHMETIC: "all computing; the peak of this device is not known",
    "tensor": "standing still for tp",
    "context": "standing still for cp",
    "expert": "standing still for ep",
    "data": "standing still for gradients and weights",
    "world": "standing still for the norm, the loss, the report of a step: for the slowest rank",
    "pipeline": "standing still for other stages, beyond the bubble: messages and jitter",
    "inherent": "of the schedule, were all stages alike",
    "imbalance": "the stage that works longest, over the mean",
    DATA: "no batch was there",
    OPTIMIZER: "moving the weights",
    AROUND: "cutting the batch; starting, packing and unscaling messages",
    REST: "in the step, and in no span",
}


class MeasuredStep(NamedTuple):
    """What ranks did in a step, mean over them and over the steps that are counted.

    Attributes:
        seconds: of a step.
        kinds: seconds by kind, as `ranks.jsonl` names them; empty where nothing says.
        ranks: of each rank that is listed, likewise, per step.
        mfu: of these steps.
        hfu: likewise.
        first: of the steps that are counted, from 1.
        last: of the steps that are counted.
        source: where it comes from.
    """

    seconds: float
    kinds: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]]
    mfu: float | None
    hfu: float | None
    first: int
    last: int
    source: str


def measured_step(record: RunRecord) -> MeasuredStep | None:
    """The mean step of a run; None where no step is done.

    Args:
        record: what the run wrote.
    """
    if record.steady:
        return _from_windows(record)
    if not record.steps:
        return None
    steps = record.steps
    kinds = _from_summary(record)
    seconds = math.fsum(kinds.values()) or math.fsum(s.seconds for s in steps) / len(steps)
    waits = [step.data_wait_seconds or 0.0 for step in steps]
    source = "summary.json, all steps of the last session" if kinds else "metrics.jsonl alone"
    kinds = kinds or {"reading batches": min(math.fsum(waits) / len(waits), seconds)}
    mfu, hfu = _utilization(record, seconds)
    return MeasuredStep(seconds, kinds, {}, mfu, hfu, steps[0].step, steps[-1].step, source)


def _from_windows(record: RunRecord) -> MeasuredStep:
    windows = record.steady
    count = sum(window.steps for window in windows)
    seconds = math.fsum(window.seconds for window in windows) / count
    kinds = _per_step([window.mean for window in windows], count)
    counted: dict[int, int] = {}
    sums: dict[int, list[Mapping[str, float]]] = {}
    for window in windows:
        for rank, each in window.ranks.items():
            counted[rank] = counted.get(rank, 0) + window.steps
            sums.setdefault(rank, []).append(each)
    ranks = {rank: _per_step(each, counted[rank]) for rank, each in sorted(sums.items())}
    mfu, hfu = _utilization(record, seconds)
    first, last = windows[0].first, windows[-1].last
    return MeasuredStep(seconds, kinds, ranks, mfu, hfu, first, last, "ranks.jsonl")


def _per_step(totals: list[Mapping[str, float]], steps: int) -> dict[str, float]:
    names = dict.fromkeys(name for each in totals for name in each if name != "seconds")
    return {name: math.fsum(each.get(name, 0.0) for each in totals) / steps for name in names}


def _from_summary(record: RunRecord) -> dict[str, float]:
    """Seconds of a step by kind, where only a summary says: compute has what no span explains."""
    split, losses = record.summary.get("time_split"), number(record.summary.get("tokens"))
    tokens = next((step.tokens for step in record.steps if step.tokens), None)
    if not isinstance(split, Mapping) or not losses or not tokens:
        return {}
    steps = losses / tokens
    inside = {n: number(s) for n, s in split.items() if n not in BETWEEN}
    return {str(n): s / steps for n, s in inside.items() if s is not None}


BETWEEN = ("validation", "checkpoints", "reports")


def _utilization(record: RunRecord, seconds: float) -> tuple[float | None, float | None]:
    """MFU and HFU of a step of so many seconds, from any step whose own is written down."""
    for step in reversed(record.steps):
        if step.mfu is not None and step.seconds:
            factor = step.seconds / seconds if seconds else 0.0
            return step.mfu * factor, (step.hfu or step.mfu) * factor
    return None, None


def step_terms(
    found: MeasuredStep, layout: Layout | None, batch: int, plan: RunPlan | None
) -> tuple[ReportTerm, ...]:
    """The terms of a step, in the order of a waterfall; the measured ones add up to it.

    Args:
        found: what was measured.
        layout: how the step was cut.
        batch: sequences per step.
        plan: what was planned.
    """
    measured = dict(_measured(found, layout, batch))
    measured[REST] = found.seconds - math.fsum(measured.values())
    planned = _planned(plan, measured)
    below = plan.parts.below if plan else {}
    names = [name for name in _order() if name in measured or planned.get(name)]
    return tuple(
        ReportTerm(
            name=name,
            measured=measured.get(name, 0.0),
            planned=planned.get(name, 0.0) if planned else None,
            share=measured.get(name, 0.0) / found.seconds if found.seconds else None,
            parts=below if name == BELOW else {},
            why=_WHY[name.rpartition(": ")[2]],
        )
        for name in names
    )


def _order() -> list[str]:
    return [
        *(AT_PEAK, RECOMPUTED, BELOW, ARITHMETIC),
        *(f"{EXPOSED}{axis}" for axis in AXES if axis not in ("pipeline", "world")),
        *(f"{BUBBLE}inherent", f"{BUBBLE}imbalance", f"{EXPOSED}pipeline", f"{EXPOSED}world"),
        *(DATA, OPTIMIZER, AROUND, REST),
    ]


def _measured(
    found: MeasuredStep, layout: Layout | None, batch: int
) -> Iterator[tuple[str, float]]:
    kinds = found.kinds
    compute = kinds.get("compute")
    if found.mfu is not None:
        yield AT_PEAK, found.mfu * found.seconds
        again = ((found.hfu or found.mfu) - found.mfu) * found.seconds
        if again:
            yield RECOMPUTED, again
        if compute is not None:
            yield BELOW, compute - found.mfu * found.seconds - again
    elif compute is not None:
        yield ARITHMETIC, compute
    for axis in AXES:
        waited = kinds.get(f"waiting for {axis}", 0.0)
        if axis == "pipeline":
            bubble = _bubble(found, layout, batch, waited)
            yield from bubble.items()
            waited -= math.fsum(bubble.values())
        if waited:
            yield f"{EXPOSED}{axis}", waited
    yield DATA, kinds.get("reading batches", 0.0)
    if "optimizer" in kinds:
        yield OPTIMIZER, kinds["optimizer"]
    preparing = kinds.get("communicate", 0.0) + kinds.get("wait", 0.0) + kinds.get("data", 0.0)
    if preparing:
        yield AROUND, preparing


def _bubble(
    found: MeasuredStep, layout: Layout | None, batch: int, waited: float
) -> dict[str, float]:
    """Of what ranks wait for other stages: what the schedule costs, then what unequal stages do."""
    if layout is None or layout.pp == 1 or not waited:
        return {}
    compute = found.kinds.get("compute", 0.0)
    inherent = min(compute * ideal_bubble(layout, batch), waited)
    stages: dict[int, list[float]] = {}
    for rank, each in found.ranks.items():
        if rank < layout.ranks:
            stages.setdefault(layout.coordinates(rank).pp, []).append(each.get("compute", 0.0))
    means = [math.fsum(each) / len(each) for each in stages.values()]
    uneven = max(means) - math.fsum(means) / len(means) if means else 0.0
    return {
        f"{BUBBLE}inherent": inherent,
        f"{BUBBLE}imbalance": min(max(uneven, 0.0), waited - inherent),
    }


def ideal_bubble(layout: Layout, batch: int) -> float:
    """Idle time of a schedule over its work, were all its stages and actions alike.

    Args:
        layout: the schedule and its sizes.
        batch: sequences per step.
    """
    if layout.pp == 1 or not batch:
        return 0.0
    m, v = layout.micro_batches(batch), chunks(layout)
    if layout.pp * m * v > _MOST_ACTIONS:
        return (layout.pp - 1) / (m * v)
    try:
        rows = build(layout.schedule, layout.pp, m, layout.v or None)
        return occupancy(simulate(rows)).bubble_over_ideal
    except PhalanxError:
        return (layout.pp - 1) / (m * v)


def _planned(plan: RunPlan | None, measured: Mapping[str, float]) -> dict[str, float]:
    """The planned seconds under the names that were measured."""
    if plan is None:
        return {}
    parts = dict(plan.parts.seconds)
    found = {f"{EXPOSED}{axis}": parts[axis] for axis in AXES}
    found |= {f"{BUBBLE}{kind}": parts[kind] for kind in ("inherent", "imbalance")}
    found |= {OPTIMIZER: parts["optimizer"], REST: parts["rest"], DATA: 0.0}
    if AT_PEAK in measured:
        return {
            **found,
            AT_PEAK: parts["at the peak"],
            RECOMPUTED: parts["recomputation"],
            BELOW: parts["below"],
        }
    arithmetic = parts["at the peak"] + parts["recomputation"] + parts["below"]
    return {**found, ARITHMETIC: arithmetic}
