"""The report of one run: all that its folder says, and what was planned, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.cluster import Cluster
from phalanx.core.errors import PhalanxError
from phalanx.core.html import html_table
from phalanx.core.layout import Layout
from phalanx.core.units import show_seconds, show_share
from phalanx.reports.kernels import by_kind
from phalanx.reports.planned import RunPlan, peak_of, plan_of
from phalanx.reports.ranks import RankTime, rank_times
from phalanx.reports.record import EventRecord, RunRecord, StepRecord, read_run
from phalanx.reports.term import ReportTerm
from phalanx.reports.traffic import ComparedMessage, compare
from phalanx.reports.wall import WallClock, wall_clock
from phalanx.reports.waterfall import MeasuredStep, measured_step, step_terms

SCHEMA = 1
MOST_POINTS = 400  # of the loss curve in a document


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Where the time of a run went, beside what was planned.

    Example:
        >>> import phalanx
        >>> found = phalanx.report("tests/reports/recorded")
        >>> abs(sum(term.measured for term in found.terms) / found.step_seconds - 1) < 1e-3
        True

    Attributes:
        record: what the run wrote.
        layout: how the step was cut; None where it cannot be read.
        step: the mean step that was measured; None where none is done.
        plan: what was planned; None where there is no plan.
        terms: of a step, which add up to it.
        wall: the wall clock of the whole run; None where steps have no times.
        traffic: bytes of rank 0 in a step, sent and planned.
        ranks: those that are listed.
        notes: what a reader should know.
    """

    record: RunRecord
    layout: Layout | None
    step: MeasuredStep | None
    plan: RunPlan | None
    terms: tuple[ReportTerm, ...]
    wall: WallClock | None
    traffic: tuple[ComparedMessage, ...]
    ranks: tuple[RankTime, ...]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the run."""
        return self.record.name

    @property
    def step_seconds(self) -> float | None:
        """The mean step that the terms add up to; None where none is done."""
        return self.step.seconds if self.step else None

    @property
    def state(self) -> str:
        """How far the run is: done, stopped, or not ended, in words."""
        record = self.record
        if record.is_done:
            return "done"
        if not record.steps:
            return "no step is done"
        kinds = [event.kind for event in record.events if event.kind in ("start", "stop")]
        if kinds and kinds[-1] == "stop":
            return "stopped before its last step"
        return "going on, or ended without a word"

    @property
    def events(self) -> tuple[EventRecord, ...]:
        """What happened, oldest first."""
        return self.record.events

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """Steps and losses; of many steps the means of some in a row."""
        known = [(step.step, step.loss) for step in self.record.steps if step.loss is not None]
        each = -(-len(known) // MOST_POINTS) or 1
        groups = [known[i : i + each] for i in range(0, len(known), each)]
        return tuple((g[-1][0], sum(loss for _, loss in g) / len(g)) for g in groups)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together, in the mean step."""
        tokens = next((step.tokens for step in self.record.steps if step.tokens), None)
        return tokens / self.step.seconds if self.step and tokens and self.step.seconds else None

    @property
    def peak_bytes(self) -> float | None:
        """Most that any rank held."""
        return max((s.peak_bytes for s in self.record.steps if s.peak_bytes), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx report --json` prints."""
        record, step, wall = self.record, self.step, self.wall
        plan = self.plan.estimate if self.plan else None
        last = record.steps[-1].step if record.steps else 0
        return {
            "schema": SCHEMA,
            "name": self.name,
            "directory": str(record.path),
            "layout": str(self.layout) if self.layout else None,
            "device": str(record.environment.get("device", "")),
            "run_state": self.state,
            "last_step": last,
            "steps": record.run.recipe.last_step if record.run else None,
            "counted_steps": [step.first, step.last] if step else None,
            "source": step.source if step else None,
            "step_seconds": self.step_seconds,
            "planned_step_seconds": plan.step_seconds if plan else None,
            "planned_step_seconds_80": list(plan.between()) if plan else None,
            "terms": [term.to_dict() for term in self.terms],
            "mfu": step.mfu if step else None,
            "hfu": step.hfu if step else None,
            "planned_mfu": plan.mfu if plan else None,
            "flops_per_second_at_peak": peak_of(record),
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": self.peak_bytes,
            "planned_peak_bytes": self.plan.peak_bytes if self.plan else None,
            "traffic": [message.to_dict() for message in self.traffic],
            "ranks": [rank.to_dict() for rank in self.ranks],
            "wall_seconds": wall.seconds if wall else None,
            "stopped_seconds": wall.stopped if wall else None,
            "wall_terms": [_wall_term(term) for term in wall.terms] if wall else [],
            "restarts": wall.restarts if wall else 0,
            "skipped": sum(each.skipped for each in record.steps),
            "goodput": wall.goodput if wall else None,
            "losses": [list(point) for point in self.losses],
            "validations": [_validation(each) for each in _validated(record)],
            "kernels": [kernel.to_dict() for kernel in record.kernels],
            "kernel_seconds": by_kind(record.kernels),
            "events": [event.to_dict() for event in self.events],
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        """The waterfall as a table, for a notebook."""
        rows = [
            (term.name, _seconds(term.measured), _seconds(term.planned), _share(term.share))
            for term in self.terms
        ]
        planned = self.plan.estimate.step_seconds if self.plan else None
        rows.append(("step", _seconds(self.step_seconds), _seconds(planned), ""))
        return html_table(self.name, rows, ("term", "measured", "planned", "share"))


def report_on(path: Path, cluster: Cluster | None = None) -> RunReport:
    """Read the folder of a run, and say where its time went.

    Args:
        path: the folder, or a file in it.
        cluster: to plan it on; None for the devices that the run itself names.

    Raises:
        UsageError: it is no run.
    """
    record = read_run(path)
    layout, step = record.layout, measured_step(record)
    found = plan_of(record, cluster)
    notes = [*record.notes, *_notes(record, step, found)]
    plan = None if isinstance(found, str) else found
    batch = record.run.recipe.batch if record.run else 0
    sent = next((window.messages for window in record.windows if window.messages), None)
    return RunReport(
        record=record,
        layout=layout,
        step=step,
        plan=plan,
        terms=step_terms(step, _for_batch(layout, batch), batch, plan) if step else (),
        wall=wall_clock(record),
        traffic=compare(sent, plan.messages() if plan else None),
        ranks=rank_times(step, layout) if step else (),
        notes=tuple(notes),
    )


def _for_batch(layout: Layout | None, batch: int) -> Layout | None:
    """The layout, if it can cut the batch at all."""
    try:
        return layout if layout and batch and layout.micro_batches(batch) else None
    except PhalanxError:
        return None


def _notes(record: RunRecord, step: MeasuredStep | None, plan: RunPlan | str) -> list[str]:
    notes = []
    if step is None:
        notes.append("no step is done yet: there is nothing to explain")
    elif not record.windows:
        notes.append(
            f"there is no ranks.jsonl: the step is explained from {step.source}, warm-up included"
        )
    elif any(window.messages for window in record.steady):
        notes.append("too few steps to leave out those that warm up: they are counted")
    if not record.environment.get("accelerators_here"):
        notes.append("peak bytes of a CPU rank are of the whole process, its libraries included")
    if isinstance(plan, str):
        notes.append(f"no plan beside it: {plan}")
    else:
        notes += plan.notes
        notes += [f"plan: {note}" for note in plan.estimate.notes if plan.assumed is None]
    return notes


def _validated(record: RunRecord) -> list[StepRecord]:
    return [step for step in record.steps if step.validation_loss is not None]


def _validation(step: StepRecord) -> Mapping[str, Any]:
    return {"step": step.step, "loss": step.validation_loss, "seconds": step.validation_seconds}


def _wall_term(term: ReportTerm) -> dict[str, Any]:
    document = term.to_dict()
    return {key: document[key] for key in ("name", "measured_seconds", "share", "why")}


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else show_seconds(seconds)


def _share(share: float | None) -> str:
    return "" if share is None else show_share(share)
