"""Seconds and bytes of one layout: the pipeline, the data axis, the optimizer, the waiting."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import log2

from phalanx.core.cluster import Cluster
from phalanx.core.errors import RefusedError
from phalanx.core.estimate import Estimate, PricedMessage, Term
from phalanx.core.layout import Layout
from phalanx.core.model import ModelShape
from phalanx.core.run import Recipe, Run
from phalanx.cost.collectives import bytes_sent
from phalanx.cost.flops import Utilization, utilization
from phalanx.cost.params import copies, rank_held, stages_of_rank
from phalanx.cost.practice import PHALANX, Practice
from phalanx.cost.refusals import refuse
from phalanx.planner.bytes import rank_bytes
from phalanx.planner.exchange import Cover, exchange
from phalanx.planner.pipeline import (
    ALL,
    Pipeline,
    hop_bytes,
    hop_seconds,
    pipeline,
)
from phalanx.planner.question import Question, ask
from phalanx.schedules.layouts import chunks, is_asynchronous


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
    inside = pipeline(question)
    data = exchange(question, cover(question, inside))
    body = [*inside.terms]
    if data.terms:
        body.append(Term("data axis", children=data.terms, worth=_sum(data.terms)))
    body.append(optimizer(question))
    step = _with_jitter(question, Term("step", children=tuple(body)))
    use = _utilization(question, step.seconds)
    return Estimate(
        layout=question.layout,
        tokens=question.tokens,
        step=step,
        mfu=use.mfu,
        hfu=use.hfu,
        convention=use.convention,
        bubble=inside.bubble,
        micro_batches=question.micro_batches,
        ranks=tuple(rank_bytes(question)),
        capacity=question.cluster.accelerator.memory,
        messages=tuple(map(_with_bytes_sent, (*_messages(question, inside), *data.messages))),
        spread=question.rates.spread,
        notes=tuple(_notes(question)),
    )


def _with_bytes_sent(message: PricedMessage) -> PricedMessage:
    """A message with what one rank sends for it."""
    if message.collective == "send":
        return message._replace(bytes_per_rank=message.bytes)
    sent = bytes_sent(message.collective, message.bytes, message.ranks)
    return message._replace(bytes_per_rank=sent)


def step_seconds(question: Question) -> float:
    """Only the seconds of `answer`, in less time: nothing is itemised, and no bytes are counted."""
    inside = pipeline(question, itemised=False)
    data = exchange(question, cover(question, inside))
    body = Term("step", children=(*inside.terms, *data.terms, optimizer(question)))
    return _with_jitter(question, body).seconds


def cover(question: Question, inside: Pipeline) -> Cover:
    """What the first rank does with one micro-batch, in all of its chunks."""
    v = chunks(question.layout)
    units = sum(count for _, count in inside.units[0]) * v
    return Cover(inside.stages[0][ALL].times(v), max(units, 1))


def optimizer(question: Question) -> Term:
    """AdamW over this rank's part of the state, at the rate of memory."""
    each = question.practice.optimizer_bytes
    most = max(
        _kept(question, rank) for rank in {0, question.layout.pp // 2, question.layout.pp - 1}
    )
    time = question.machine.sweep_seconds(most * each)
    reason = f"{each:g} bytes for each of {most:.3g} parameters"
    return Term("optimizer", time, worth=time, reason=reason)


def _kept(question: Question, pp_rank: int) -> float:
    """Parameters whose state a rank keeps."""
    held = rank_held(question.shape, question.layout, pp_rank)
    if not question.layout.zero_stage:
        return float(held.total)
    group = copies(question.layout)
    return held.shared / group.shared + held.experts / group.experts


def _with_jitter(question: Question, body: Term) -> Term:
    """Add what replicas wait for the slowest: a share of a step for every doubling of them.

    Only the data axis makes all ranks wait at once; replicas in one domain differ little.
    """
    layout, share = question.layout, question.rates.jitter
    domains = min(question.cluster.domains(layout.ranks), layout.dp * layout.cp)
    if domains == 1 or not share:
        return body
    wait = body.seconds * share * log2(domains)
    reason = f"{share:.2%} of a step for every doubling of {domains} replicas in other domains"
    jitter = Term("waiting for the slowest rank", wait, worth=wait, reason=reason)
    return replace(body, children=(*body.children, jitter))


def _sum(terms: Iterable[Term]) -> float:
    return sum(term.seconds for term in terms)


def _utilization(question: Question, lasts: float) -> Utilization:
    shape, layout = question.shape, question.layout
    peak = question.machine.peak * layout.ranks
    return utilization(shape, question.seq, question.tokens / lasts, peak, layout.recompute)


def _messages(question: Question, inside: Pipeline) -> Iterator[PricedMessage]:
    """What the rank that sets the pace sends inside the pipeline, equal messages added up."""
    layout, m = question.layout, question.micro_batches
    found: dict[tuple[str, str, str, float, int], tuple[float, float, float]] = {}
    for stage in stages_of_rank(layout, inside.pace):
        for unit, count in inside.units[stage]:
            for sent in unit.sent:
                key = (sent.axis, sent.collective, sent.purpose, sent.bytes, sent.ranks)
                times = m * count * sum(sent.times)
                shown = m * count * sent.shown.total
                before = found.get(key, (0.0, 0.0, 0.0))
                more = (times, times * sent.seconds, shown)
                found[key] = tuple(a + b for a, b in zip(before, more, strict=True))  # type: ignore[assignment]  # three of three
    for (axis, collective, purpose, size, ranks), (times, lasts, shown) in found.items():
        yield PricedMessage(axis, collective, purpose, size, times, lasts, shown, ranks)
    if layout.pp > 1:
        times = 2 * m * chunks(layout)
        hops = inside.terms[-1].find("hops")
        yield PricedMessage(
            "pipeline",
            "send",
            "activations, gradients",
            hop_bytes(question),
            times,
            times * hop_seconds(question),
            hops.seconds if hops else 0.0,
            layout.pp,
        )


def _notes(question: Question) -> Iterator[str]:
    rates = question.rates
    if not rates.rows:
        yield f"no published run on {question.cluster.accelerator.name} was used: {rates.source}"
    if not question.cluster.accelerator.peaks:
        yield f"nobody published the peak of {question.cluster.accelerator.name}; assumed"
    unpriced = " ".join(_unpriced(question.layout))
    if unpriced:
        yield f"the seconds are those without {unpriced}: what it costs or saves is not priced"
    if is_asynchronous(question.layout):
        yield (
            f"schedule={question.layout.schedule} is priced with one update of a step, and moves "
            f"the weights after each of {question.micro_batches} micro-batches; the weights that "
            "it stashes are not counted"
        )
    if question.practice is PHALANX:
        yield from _untrainable(question)


def _unpriced(layout: Layout) -> Iterator[str]:
    """What a layout asks for and no second knows of; the bytes do."""
    if layout.offload:
        yield f"offload={layout.offload}"
    if layout.cp > 1 and layout.context != "ring":
        yield f"context={layout.context}"
    for key in ("compile", "optimistic"):
        if getattr(layout, key):
            yield f"{key}=on"


def _untrainable(question: Question) -> Iterator[str]:
    """Why `phalanx train` would refuse what is priced here, if it would."""
    clip = 0.0 if is_asynchronous(question.layout) else 1.0
    recipe = Recipe(seq=question.seq, batch=question.batch, clip=clip)
    try:
        refuse(Run(model=question.shape, layout=question.layout, recipe=recipe))
    except RefusedError as refusal:
        yield f"phalanx train refuses this: {refusal}"
