"""From the first forward of a step to its last backward: the schedule played with stage costs.

Symbols: m micro-batches per step and rank, p pipeline ranks.
"""

from dataclasses import dataclass

import numpy as np

from phalanx.core.estimate import Term
from phalanx.core.schedule import Kind
from phalanx.cost.blocks import HALF
from phalanx.cost.compute import Passes
from phalanx.cost.wires import Group, seconds
from phalanx.planner.pace import Floats, makespans
from phalanx.planner.question import Question
from phalanx.planner.stages import PEAKS, UnitCost, group_links, stage_units
from phalanx.schedules.layouts import num_stages, placement

# What the time inside the pipeline goes to, and how a report calls it.
INSIDE = {
    "products": "matrix products",
    "attention": "attention",
    "sweeps": "passes over memory",
    "accumulation": "adding gradients up",
    "recompute": "recomputation",
    "launch": "waiting for kernel launches",
    "tensor": "tensor axis",
    "context": "context axis",
    "expert": "expert axis",
    "weights": "weights and gradients of ZeRO",
}
ALL = "all"
HOPS = "hops"

StageTerms = dict[str, Passes]


@dataclass(frozen=True)
class Pipeline:
    """The step from the first forward to the last backward.

    Attributes:
        units: of every stage, with their number.
        stages: seconds of one micro-batch on every stage, by what they go to, and `ALL`.
        pace: the pipeline rank that works longest.
        terms: its time, idle time included; they add up to the whole.
        bubble: its idle share.
    """

    units: list[list[tuple[UnitCost, int]]]
    stages: list[StageTerms]
    pace: int
    terms: tuple[Term, ...]
    bubble: float


def pipeline(question: Question, *, itemised: bool = True) -> Pipeline:
    """Play the schedule, and say what the rank that sets the pace does all the time.

    Args:
        question: what is priced.
        itemised: price every part by playing the schedule without it too; else all the time is
            one term.
    """
    layout, m = question.layout, question.micro_batches
    units = [stage_units(question, stage) for stage in range(num_stages(layout))]
    stages = [_total(each) for each in units]
    ranks = ranks_of_stages(question)
    gains = _play(question, stages, ranks, itemised=itemised)
    if not itemised:
        return Pipeline(units, stages, 0, (Term("pipeline", gains[ALL]),), 0.0)
    busy = _busy(stages, ranks, m, layout.pp)
    pace = max(range(layout.pp), key=lambda rank: busy[rank][ALL].total)
    own, lasts = busy[pace], gains[ALL]
    idle = max(lasts - own[ALL].total, 0.0)
    terms = [_inside(name, own, gains) for name in INSIDE if own.get(name, Passes()).total > 0]
    if layout.pp > 1:
        terms.append(_idle(idle, min(gains[HOPS], idle)))
    return Pipeline(units, stages, pace, tuple(terms), idle / lasts)


def ranks_of_stages(question: Question) -> tuple[int, ...]:
    """The rank of every stage of the schedule, which may hold the model twice."""
    return placement(question.layout).ranks


def hop_bytes(question: Question) -> float:
    """One tensor between stages: b s h, of which each tp rank carries its part."""
    layout = question.layout
    return HALF * layout.mb * question.seq / layout.cp * question.shape.hidden / layout.tp


def hop_seconds(question: Question) -> float:
    """How long it takes to the next stage."""
    if question.layout.pp == 1:
        return 0.0
    on = group_links(question, Group(question.layout.pp, question.stride["pp"]))
    return seconds("send", hop_bytes(question), on)


def _total(units: list[tuple[UnitCost, int]]) -> StageTerms:
    total: StageTerms = {}
    everything = Passes()
    for unit, count in units:
        for name, passes in unit.terms.items():
            total[name] = total.get(name, Passes()).plus(passes.times(count))
        everything = everything.plus(unit.seconds.times(count))
    return {**total, ALL: everything}


def _busy(stages: list[StageTerms], ranks: tuple[int, ...], m: int, p: int) -> list[StageTerms]:
    """Seconds that every rank works in a step, by what they go to."""
    busy: list[StageTerms] = [{ALL: Passes()} for _ in range(p)]
    each = m * len(stages) / len(ranks)  # a model that is held twice shares the micro-batches
    for place, rank in enumerate(ranks):
        for name, passes in stages[place % len(stages)].items():
            before = busy[rank].get(name, Passes())
            busy[rank][name] = before.plus(passes.times(each))
    return busy


def _play(
    question: Question, stages: list[StageTerms], ranks: tuple[int, ...], *, itemised: bool
) -> dict[str, float]:
    """Seconds of the pipeline, under `ALL`, and what it would gain without each part."""
    layout, m = question.layout, question.micro_batches
    names = [name for name in INSIDE if itemised and any(name in stage for stage in stages)]
    if len(ranks) == 1:
        whole = stages[0][ALL].total
        gained = {n: m * (whole - _without(stages[0], n).total) for n in names}
        return {ALL: m * whole, HOPS: 0.0, **gained}
    sets = [[_without(stages[i % len(stages)], n) for i in range(len(ranks))] for n in names]
    now = [stages[i % len(stages)][ALL] for i in range(len(ranks))]
    table = np.array([now, now, *sets])  # sets x stages x passes
    hops = np.full(len(table), hop_seconds(question))
    hops[1] = 0.0
    lasts = makespans(layout.schedule, layout.pp, m, question.v, _costs(table), hops)
    shorter = zip((HOPS, *names), lasts[1:], strict=True)
    return {ALL: float(lasts[0]), **{name: float(lasts[0] - time) for name, time in shorter}}


def _without(stage: StageTerms, name: str) -> Passes:
    """A stage without one part; without products, only as fast as the peak allows."""
    saved = stage.get(name, Passes())
    ideal = stage.get(f"{name} at peak", Passes())
    return stage[ALL].plus(saved.times(-1.0)).plus(ideal)


def _costs(table: Floats) -> dict[Kind, Floats]:
    forward, inputs, weights = (np.maximum(table[:, :, i], 0.0) for i in range(3))
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: inputs + weights,
        Kind.INPUT_GRAD: inputs,
        Kind.WEIGHT_GRAD: weights,
    }


def _inside(name: str, own: StageTerms, gains: dict[str, float]) -> Term:
    """One part of the work; products and attention against what the peak allows."""
    lasts, label, worth = own[name].total, INSIDE[name], gains[name]
    peak = f"{name} at peak"
    if peak not in PEAKS:
        return Term(label, lasts, worth=worth)
    ideal = own[peak].total
    below = Term("below the peak", lasts - ideal, worth=worth)
    return Term(label, children=(Term("at the peak", ideal), below), worth=worth)


def _idle(idle: float, hops: float) -> Term:
    parts = (Term("bubble", idle - hops, worth=idle - hops), Term("hops", hops, worth=hops))
    return Term("pipeline axis", children=parts, worth=idle)
