"""Seconds and bytes of one layout: costs of the stages, the schedule played with them, and the rest.

Symbols: m micro-batches per step and rank, p pipeline ranks, v stages per rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log2

import numpy as np

from phalanx.core.cluster import Cluster
from phalanx.core.estimate import Estimate, Message, RankBytes, Term
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.schedule import Kind
from phalanx.cost.blocks import HALF
from phalanx.cost.compute import Passes
from phalanx.cost.flops import utilization
from phalanx.cost.memory import rank_memory
from phalanx.cost.params import copies, rank_held
from phalanx.cost.practice import PHALANX, Practice
from phalanx.cost.wires import Group, seconds
from phalanx.plan.pace import Floats, in_flight, levels, makespans
from phalanx.plan.question import Question, ask
from phalanx.plan.stages import UnitCost, data_links, group_links, stage_units

# What a step's time goes to inside the pipeline, and how a report calls it.
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
# Bytes per parameter that AdamW reads and writes: gradient, master and moments, weight in 16 bits;
# and twice the gradient, for its norm and for clipping.
OPTIMIZER_BYTES = 4 + 3 * (4 + 4) + 2 + 4 + 8


def estimate(
    shape: ModelShape,
    cluster: Cluster,
    layout: Layout,
    seq: int,
    batch: int,
    practice: Practice = PHALANX,
) -> Estimate:
    """Price one layout.

    Args:
        shape: the model.
        cluster: as many devices as the layout has ranks.
        layout: how the step is cut.
        seq: s, tokens per sequence.
        batch: sequences per step.
        practice: what the program does.

    Raises:
        UsageError: a sequence or a batch without tokens.
        RefusedError: the model, the batch or the devices cannot be cut so.
    """
    return answer(ask(shape, cluster, layout, seq, batch, practice))


def answer(question: Question) -> Estimate:
    """Price the layout of a question."""
    pipeline = _pipeline(question)
    data, data_messages = _data_axis(question, pipeline)
    body = Term("step", children=(*pipeline.terms, *data, _optimizer(question)))
    step = _with_jitter(question, body)
    use = _utilization(question, step.seconds)
    return Estimate(
        layout=question.layout,
        tokens=question.tokens,
        step=step,
        mfu=use.mfu,
        hfu=use.hfu,
        convention=use.convention,
        bubble=pipeline.bubble,
        micro_batches=question.micro_batches,
        ranks=tuple(rank_bytes(question)),
        capacity=question.cluster.accelerator.memory,
        messages=(*_messages(question, pipeline), *data_messages),
        spread=question.rates.spread,
    )


@dataclass(frozen=True)
class Pipeline:
    """The step from the first forward to the last backward.

    Attributes:
        stages: units of every stage, with their number.
        totals: seconds of one micro-batch on every stage, by what they go to.
        pace: the pipeline rank that works longest.
        terms: its time, idle time included; they add up to the whole.
        bubble: its idle share.
    """

    stages: list[list[tuple[UnitCost, int]]]
    totals: list[dict[str, Passes]]
    pace: int
    terms: tuple[Term, ...]
    bubble: float


def _pipeline(question: Question) -> Pipeline:
    layout, m = question.layout, question.micro_batches
    stages = [stage_units(question, stage) for stage in range(layout.num_stages)]
    totals = [_stage_total(units) for units in stages]
    hop = _hop(question)
    ranks = _ranks_of_stages(question)
    busy = _busy(totals, ranks, m, layout.pp, len(ranks) // len(totals))
    pace = max(range(layout.pp), key=lambda rank: busy[rank]["all"].total)
    lasts, worths = _play(question, totals, hop)
    own = busy[pace]
    work = own["all"].total
    terms = [
        Term(label, own[name].total, worth=worths.get(name, 0.0))
        for name, label in INSIDE.items()
        if own.get(name, Passes()).total > 0 and name != "products"
    ]
    products = _products(own, worths)
    idle = Term("pipeline bubble", max(lasts - work, 0.0), worth=max(lasts - work, 0.0))
    bubble = (lasts - work) / lasts
    return Pipeline(stages, totals, pace, (products, *terms, idle), max(bubble, 0.0))


def _products(own: dict[str, Passes], worths: dict[str, float]) -> Term:
    """Products and attention at the peak, and what they take longer."""
    ideal = own["at peak"].total
    late = own["products"].total - ideal
    return Term(
        INSIDE["products"],
        children=(Term("at the peak", ideal), Term("below the peak", late)),
        worth=worths["products"],
    )


def _stage_total(units: list[tuple[UnitCost, int]]) -> dict[str, Passes]:
    total: dict[str, Passes] = {}
    for unit, count in units:
        for name, passes in unit.terms.items():
            total[name] = total.get(name, Passes()).plus(passes.times(count))
    inside = Passes()
    for name, passes in total.items():
        if name != "at peak":
            inside = inside.plus(passes)
    return {**total, "all": inside}


def _ranks_of_stages(question: Question) -> tuple[int, ...]:
    """The rank of every stage of the schedule, which may hold the model twice."""
    layout = question.layout
    m = min(question.micro_batches, 2 * layout.pp)
    if layout.schedule in ("zb-v", "dualpipev", "dualpipe"):
        return levels(layout.schedule, layout.pp, m, question.v).ranks
    return tuple(stage % layout.pp for stage in range(layout.num_stages))


def _busy(
    totals: list[dict[str, Passes]], ranks: tuple[int, ...], m: int, p: int, copies_: int
) -> list[dict[str, Passes]]:
    """Seconds that every rank works in a step, by what they go to."""
    busy: list[dict[str, Passes]] = [{} for _ in range(p)]
    for place, rank in enumerate(ranks):
        for name, passes in totals[place % len(totals)].items():
            before = busy[rank].get(name, Passes())
            busy[rank][name] = before.plus(passes.times(m / copies_))
    return busy


def _play(
    question: Question, totals: list[dict[str, Passes]], hop: float
) -> tuple[float, dict[str, float]]:
    """Seconds of the pipeline, and what it would gain without each part."""
    layout, m = question.layout, question.micro_batches
    if layout.pp == 1 and layout.v == 1:
        lasts = m * totals[0]["all"].total
        return lasts, {name: m * passes.total for name, passes in totals[0].items()}
    places = len(_ranks_of_stages(question))
    names = [n for n in INSIDE if any(n in total for total in totals)]
    table = np.array(
        [[totals[i % len(totals)]["all"] for i in range(places)]]
        + [
            [
                np.subtract(
                    totals[i % len(totals)]["all"], totals[i % len(totals)].get(n, Passes())
                )
                for i in range(places)
            ]
            for n in names
        ]
        + [[totals[i % len(totals)]["all"] for i in range(places)]]
    )  # sets x stages x passes
    costs = _costs(table)
    hops = np.full(len(table), hop)
    hops[-1] = 0.0
    lasts = makespans(layout.schedule, layout.pp, m, question.v, costs, hops)
    gains = {name: float(lasts[0] - lasts[i + 1]) for i, name in enumerate(names)}
    gains["hops"] = float(lasts[0] - lasts[-1])
    return float(lasts[0]), gains


def _costs(table: Floats) -> dict[Kind, Floats]:
    forward, inputs, weights = (np.maximum(table[:, :, i], 0.0) for i in range(3))
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: inputs + weights,
        Kind.INPUT_GRAD: inputs,
        Kind.WEIGHT_GRAD: weights,
    }


def _hop_bytes(question: Question) -> float:
    """One tensor between stages: b s h, of which each tp rank carries its part."""
    layout = question.layout
    size = HALF * layout.mb * question.seq / layout.cp * question.shape.hidden
    return size / layout.tp


def _hop(question: Question) -> float:
    layout = question.layout
    if layout.pp == 1:
        return 0.0
    on = group_links(question, Group(layout.pp, question.stride["pp"]))
    return seconds("send", _hop_bytes(question), on)


def _data_axis(
    question: Question, pipeline: Pipeline
) -> tuple[tuple[Term, ...], tuple[Message, ...]]:
    """What the data axis adds: the first gather and the last reduction, at the least.

    Gradients hide behind the backward of the last micro-batch and weights behind the first
    forward, if the program lets them; the part of one unit always shows.
    """
    layout, practice = question.layout, question.practice
    if layout.dp * layout.cp == 1:
        return (), ()
    on = data_links(question)
    params = rank_held(question.shape, layout, 0).total
    units = max(sum(count for unit, count in pipeline.stages[0]) * layout.v, 1)
    one = pipeline.totals[0]["all"].times(layout.v)
    if layout.zero_stage >= 2:
        gather = seconds("all_gather", params * HALF, on) / units * (layout.zero_stage == 3)
        reduce = seconds("reduce_scatter", params * practice.gradient, on) / units
        terms = [Term("first gather", gather, worth=gather)] if gather else []
        return (*terms, Term("last reduction", reduce, worth=reduce)), ()
    name = "reduce_scatter" if layout.zero_stage else "all_reduce"
    size = params * practice.gradient
    reduce = seconds(name, size, on)
    exposed = _exposed(reduce, one.I + one.W, units, hides=practice.hides_gradients)
    terms = [Term("reduction of gradients", exposed, worth=exposed)]
    messages = [Message("data", name, "gradients", size, 1, reduce, exposed)]
    if layout.zero_stage:
        gather = seconds("all_gather", params * HALF, on)
        shown = _exposed(gather, one.F, units, hides=practice.hides_weights)
        terms.append(Term("gather of weights", shown, worth=shown))
        messages.append(Message("data", "all_gather", "weights", params * HALF, 1, gather, shown))
    return tuple(terms), tuple(messages)


def _exposed(message: float, behind: float, units: int, *, hides: bool) -> float:
    if not hides:
        return message
    return max(message - behind * (1 - 1 / units), message / units)


def _optimizer(question: Question) -> Term:
    """AdamW over this rank's part of the state, at the rate of memory."""
    layout = question.layout
    worst = max(_kept_parameters(question, rank) for rank in {0, layout.pp - 1, layout.pp // 2})
    time = question.machine.sweep_seconds(worst * OPTIMIZER_BYTES)
    reason = f"{OPTIMIZER_BYTES} bytes for each of {worst:.3g} parameters"
    return Term("optimizer", time, worth=time, reason=reason)


def _kept_parameters(question: Question, pp_rank: int) -> float:
    layout = question.layout
    held = rank_held(question.shape, layout, pp_rank)
    group = copies(layout)
    if not layout.zero_stage:
        return float(held.total)
    return held.shared / group.shared + held.experts / group.experts


def _with_jitter(question: Question, body: Term) -> Term:
    """Add what ranks wait for the slowest: a share of the step for every doubling of the domains."""
    domains = question.cluster.domains(question.layout.ranks)
    wait = body.seconds * question.rates.jitter * log2(domains) if domains > 1 else 0.0
    if not wait:
        return body
    reason = f"{question.rates.jitter:.1%} for every doubling of {domains} domains"
    return replace(body, children=(*body.children, Term("jitter", wait, worth=wait, reason=reason)))


def _utilization(question: Question, step_seconds: float):
    shape, layout = question.shape, question.layout
    peak = question.machine.peak * layout.ranks
    rate = question.tokens / step_seconds
    return utilization(shape, question.seq, rate, peak, layout.recompute)


def rank_bytes(question: Question) -> Iterable[RankBytes]:
    """Bytes of every pipeline rank."""
    layout = question.layout
    held = in_flight(layout.schedule, layout.pp, question.micro_batches, question.v)
    priced = replace(layout, precision="bf16") if layout.precision == "fp8" else layout
    for rank in range(layout.pp):
        memory = rank_memory(
            question.shape, priced, question.seq, rank, held[rank], question.practice.stack
        )
        classes = tuple(memory.by_class().items())
        yield RankBytes(rank, memory.moment, classes, held[rank])


def _messages(question: Question, pipeline: Pipeline) -> Iterable[Message]:
    """What the rank that sets the pace sends inside the pipeline, equal messages added up."""
    layout, m = question.layout, question.micro_batches
    found: dict[tuple[str, str, str, float], list[float]] = {}
    for stage in range(pipeline.pace, layout.num_stages, layout.pp):
        for unit, count in pipeline.stages[stage]:
            for sent in unit.sent:
                key = (sent.axis, sent.collective, sent.purpose, sent.bytes)
                times = m * count * sum(sent.times)
                shown = (
                    m * count * sum(n * s for n, s in zip(sent.times, sent.exposed, strict=True))
                )
                entry = found.setdefault(key, [0.0, 0.0, 0.0])
                entry[0] += times
                entry[1] += times * sent.seconds
                entry[2] += shown
    for key, (times, lasted, shown) in found.items():
        yield Message(*key, times, lasted, shown)
    if layout.pp > 1:
        hop, size = _hop(question), _hop_bytes(question)
        times = 2 * m * layout.v
        yield Message(
            "pipeline", "send", "activations and their gradients", size, times, times * hop, 0.0
        )
