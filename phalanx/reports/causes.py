"""Why a run is slower than it could be: causes in the order in which one checks them.

Data, kernels and batch size, tp within the domain, overlap, bubble, stragglers; then what stands
between steps. Each says what it measured; a change is one whose gain the planner has computed on
this run's own devices, and only one that it expects to help and to fit.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from phalanx.core.errors import PhalanxError
from phalanx.core.layout import Layout
from phalanx.core.recompute import MODES
from phalanx.core.run import Run
from phalanx.core.units import show_seconds, show_share
from phalanx.reports import waterfall
from phalanx.reports.finding import Finding
from phalanx.reports.ranks import slowest
from phalanx.reports.report import RunReport
from phalanx.reports.term import measured, total
from phalanx.reports.wall import REPORTS, SAVES
from phalanx.schedules.registry import SPECS
from phalanx.trainer.run.goodput import REPEATED, RESTARTING, SKIPPED, VALIDATION

# Shares of a step, or of the wall clock, from which a cause is worth a change.
DATA = 0.02
EFFICIENCY = 0.5  # of the peak, while a rank computes
COMPUTING = 0.3
TENSOR = 0.15
OVERLAP = 0.05
BUBBLE = 0.05
STRAGGLER = 1.1  # times the median of its peers
BETWEEN = 0.03
LEAST_GAIN = 0.002  # of a step, below which the planner's answer is noise


class _Change(NamedTuple):
    """Another layout of the same run, and what the planner expects of it."""

    words: str
    gain: float


def causes(report: RunReport) -> tuple[Finding, ...]:
    """Every cause, seen or not, in the order of the check.

    Args:
        report: of a run.
    """
    step = report.step
    if step is None or not step.seconds:
        return ()
    inside = (_data, _kernels, _tensor, _overlap, _bubble, _stragglers)
    outside = (_saves, _restarts, _skipped)
    return tuple(check(report) for check in (*inside, *outside))


def _data(report: RunReport) -> Finding:
    share = _share(report, waterfall.DATA)
    waited = show_seconds(measured(report.terms, waterfall.DATA))
    evidence = f"ranks wait {waited} of a step for their batch ({show_share(share)})"
    seen = share >= DATA
    change = "--data TOKENS.npy: ids on a local disk instead of text" if seen else ""
    return Finding("data", seen, evidence, change, share if seen else None)


def _kernels(report: RunReport) -> Finding:
    cause, step = "kernels and batch size", report.step
    if step is None or step.mfu is None or "compute" not in step.kinds:
        return Finding(cause, False, "not measured: no peak is known, or no time of computing")
    compute = step.kinds["compute"]
    at_peak = (step.hfu or step.mfu) * step.seconds
    efficiency = at_peak / compute if compute else 0.0
    share = compute / step.seconds
    again = ((step.hfu or step.mfu) - step.mfu) * step.seconds / step.seconds
    evidence = (
        f"while they compute, {show_share(share)} of a step, ranks reach {show_share(efficiency)} "
        f"of the peak; recomputation is {show_share(again)} of a step"
    )
    seen = efficiency < EFFICIENCY and share >= COMPUTING
    return _answered(report, Finding(cause, seen, evidence), _larger_work)


def _tensor(report: RunReport) -> Finding:
    cause, layout = "tp within the domain", report.layout
    if layout is None or layout.tp == 1:
        return Finding(cause, False, "tp=1: nothing travels along it")
    share = _share(report, f"{waterfall.EXPOSED}tensor")
    domain = report.plan.cluster.domain_size if report.plan else None
    outside = domain is not None and layout.tp > domain
    evidence = f"ranks stand still for tp={layout.tp} in {show_share(share)} of a step"
    evidence += f"; the domain has {domain} devices" if domain else ""
    return _answered(report, Finding(cause, outside or share >= TENSOR, evidence), _less_tensor)


def _overlap(report: RunReport) -> Finding:
    names = [f"{waterfall.EXPOSED}{axis}" for axis in ("data", "context", "expert")]
    found = [(name, _share(report, name)) for name in names]
    share = sum(each for _, each in found)
    parts = [f"{name.rpartition(' ')[2]} {show_share(each)}" for name, each in found if each]
    evidence = f"messages that no computing hides are {show_share(share)} of a step"
    evidence += f": {', '.join(parts)}" if parts else ""
    return _answered(report, Finding("overlap", share >= OVERLAP, evidence), _more_overlap)


def _bubble(report: RunReport) -> Finding:
    layout = report.layout
    if layout is None or layout.pp == 1:
        return Finding("bubble", False, "pp=1: there is none")
    inherent = _share(report, f"{waterfall.BUBBLE}inherent")
    uneven = _share(report, f"{waterfall.BUBBLE}imbalance")
    hops = _share(report, f"{waterfall.EXPOSED}pipeline")
    evidence = (
        f"idle {show_share(inherent)} of a step by the schedule, {show_share(uneven)} by unequal "
        f"stages, {show_share(hops)} for messages and jitter"
    )
    seen = inherent + uneven + hops >= BUBBLE
    return _answered(report, Finding("bubble", seen, evidence), _smaller_bubble)


def _stragglers(report: RunReport) -> Finding:
    told = [event for event in report.events if event.kind == "straggler"]
    rank = slowest(report.ranks)
    if rank is None:
        evidence = "not measured: there is no ranks.jsonl"
        return Finding("stragglers", bool(told), told[-1].text if told else evidence)
    evidence = (
        f"rank {rank.rank} ({rank.coordinates}) computes {show_seconds(rank.compute)} of a step, "
        f"{rank.over_peers:.2f} times the median of its peers"
    )
    if told:
        evidence += f"; told {len(told)} times, last: {told[-1].text}"
    seen = rank.over_peers >= STRAGGLER or bool(told)
    if not seen:
        return Finding("stragglers", False, evidence)
    seconds = report.step.seconds if report.step else 0.0
    gain = rank.compute * (1 - 1 / rank.over_peers) / seconds if rank.over_peers > 1 else None
    change = f"look at the machine of rank {rank.rank}: clocks, heat, other work; or leave it out"
    return Finding("stragglers", True, evidence, change, gain)


def _saves(report: RunReport) -> Finding:
    share = _wall_share(report, SAVES)
    between = _wall_share(report, VALIDATION) + _wall_share(report, REPORTS)
    evidence = f"saves are {show_share(share)} of the wall clock, validation and reports "
    evidence += show_share(between)
    every = report.record.run.recipe.checkpoint_every if report.record.run else 0
    if share < BETWEEN or not every:
        return Finding("saves", share >= BETWEEN, evidence)
    change = f"--set recipe.checkpoint_every={2 * every}"
    return Finding("saves", True, evidence, change, share / 2)


def _restarts(report: RunReport) -> Finding:
    repeated, restarting = (_wall_share(report, name) for name in (REPEATED, RESTARTING))
    count = report.wall.restarts if report.wall else 0
    evidence = (
        f"{count} restart{'' if count == 1 else 's'}: {show_share(restarting)} of the clock to "
        "start again, "
        f"{show_share(repeated)} for steps done twice"
    )
    if repeated + restarting < BETWEEN:
        return Finding("restarts", False, evidence)
    told = [event.text for event in report.events if event.kind == "restart"]
    evidence += f"; last: {told[-1]}" if told else ""
    every = report.record.run.recipe.checkpoint_every if report.record.run else 0
    if repeated < BETWEEN or every < 2:
        return Finding("restarts", True, evidence, "find out why ranks die")
    change = f"--set recipe.checkpoint_every={every // 2}"
    return Finding("restarts", True, evidence, change, repeated / 2)


def _skipped(report: RunReport) -> Finding:
    share = _wall_share(report, SKIPPED)
    count = sum(step.skipped for step in report.record.steps)
    evidence = f"{count} steps moved no weights, {show_share(share)} of the clock"
    if share < BETWEEN or report.record.run is None:
        return Finding("skipped steps", share >= BETWEEN, evidence)
    rate = report.record.run.recipe.learning_rate
    change = f"--set recipe.learning_rate={rate / 2:g}"
    return Finding("skipped steps", True, evidence, change, share)


def _share(report: RunReport, name: str) -> float:
    return measured(report.terms, name) / total(report.terms) if total(report.terms) else 0.0


def _wall_share(report: RunReport, name: str) -> float:
    wall = report.wall
    return measured(wall.terms, name) / wall.seconds if wall and wall.seconds else 0.0


Candidates = Callable[[Run], Iterator[Layout]]


def _answered(report: RunReport, finding: Finding, candidates: Candidates) -> Finding:
    """Add the change that the planner expects most of, where a cause is seen."""
    plan = report.plan
    if not finding.seen:
        return finding
    if plan is None:
        return finding._replace(change="no plan of this run: give --cluster FILE.toml")
    best = _best(report, candidates(plan.run))
    if best is None:
        return finding._replace(
            change="no single key of the layout that the planner expects to help"
        )
    return finding._replace(change=f'--layout "{best.words}"', expected_gain=best.gain)


def _best(report: RunReport, layouts: Iterable[Layout]) -> _Change | None:
    plan = report.plan
    if plan is None:
        return None
    before = plan.estimate
    changes = []
    for layout in layouts:
        try:
            found = plan.price(replace(plan.run, layout=layout)).estimate()
        except PhalanxError:
            continue
        gain = 1 - found.step_seconds / before.step_seconds
        if gain >= LEAST_GAIN and (found.fits or not before.fits):
            changes.append(_Change(str(layout), gain))
    return max(changes, key=lambda change: change.gain, default=None)


def _larger_work(run: Run) -> Iterator[Layout]:
    """Larger products, and less that is done again."""
    layout = run.layout
    for factor in (2, 4):
        yield replace(layout, mb=layout.mb * factor)
    for mode in MODES:
        if mode != layout.recompute:
            yield replace(layout, recompute=mode)
    yield from _less_tensor(run)


def _less_tensor(run: Run) -> Iterator[Layout]:
    """Fewer tensor-parallel ranks, and more of another kind."""
    layout, tp = run.layout, run.layout.tp
    while tp % 2 == 0:
        tp //= 2
        other = layout.tp // tp
        yield replace(layout, tp=tp, dp=layout.dp * other)
        yield replace(layout, tp=tp, pp=layout.pp * other)


def _more_overlap(run: Run) -> Iterator[Layout]:
    """Fewer messages of the data axis, or more work for each of them."""
    layout = run.layout
    for zero in range(4):
        if zero != layout.zero:
            yield replace(layout, zero=zero)
    if layout.zero == 3:
        yield replace(layout, reshard=not layout.reshard)
    yield replace(layout, mb=layout.mb * 2)
    if layout.cp > 1:
        for context in ("ring", "gather", "ulysses"):
            if context != layout.context:
                yield replace(layout, context=context)


def _smaller_bubble(run: Run) -> Iterator[Layout]:
    """More micro-batches, a schedule that idles less, or fewer stages."""
    layout = run.layout
    if layout.mb % 2 == 0:
        yield replace(layout, mb=layout.mb // 2)
    if layout.mb > 1:
        yield replace(layout, mb=1)
    plain = replace(layout, v=0, stages=())
    for spec in SPECS:
        if spec.can_be_searched:
            for v in (0,) if spec.chunks.fixed else (2, 4):
                other = replace(plain, schedule=spec.name, v=v)
                if (other.schedule, other.v) != (layout.schedule, layout.v):
                    yield other
    if layout.pp % 2 == 0:
        yield replace(plain, pp=layout.pp // 2, dp=layout.dp * 2)
