"""What a plan consists of, and its form for scripts: one JSON document, or rows of a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.core.estimate import Estimate
from phalanx.planner.diagnosis import Diagnosis
from phalanx.planner.explain import differences, why_not_faster, why_slower
from phalanx.planner.goodput import Campaign
from phalanx.planner.refine import SEARCHED_KEYS
from phalanx.planner.rerank import Ranked
from phalanx.planner.search import Found

SCHEMA = 1
HEADERS = (
    "rank",
    "layout",
    "step_seconds",
    "mfu",
    "hfu",
    "tokens_per_second",
    "peak_bytes",
    "bubble",
    "reasons",
)


@dataclass(frozen=True)
class Plan:
    """All that is shown.

    Attributes:
        found: what the search found.
        seconds: how long it took.
        book: the layout of the textbook procedure, or why it has none.
        why: about the layout that was asked for, if one was.
        campaign: of the whole training, if tokens for it were given.
        notes: what a reader should know.
        binary: GiB was asked for, not GB.
    """

    found: Found
    seconds: float
    book: Estimate | str
    why: Diagnosis | None
    campaign: Campaign | None
    notes: tuple[str, ...]
    binary: bool

    @property
    def best(self) -> Estimate:
        """The fastest layout."""
        return self.found.ranked[0].estimate


def reasons(found: Estimate, best: Estimate) -> tuple[str, ...]:
    """Why a layout is slower than the best; of the best, what it spends most on."""
    return why_not_faster(found) if found is best else why_slower(found, best)


def document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON."""
    found, request = plan.found, plan.found.request
    return {
        "schema": SCHEMA,
        "model": request.shape.name,
        "framework": request.framework.name,
        "searched": list(SEARCHED_KEYS),
        "cluster": request.cluster.name,
        "devices": request.cluster.count,
        "capacity_bytes": request.capacity,
        "seq": request.seq,
        "batch": request.batch,
        "tokens": request.tokens,
        "candidates": found.considered,
        "feasible": found.feasible,
        "seconds": plan.seconds,
        "refused": dict(found.refused),
        "layouts": [
            {"rank": ranked.rank, **record(ranked.estimate, plan.best)} for ranked in found.ranked
        ],
        "procedure": _book(plan),
        "why": _why(plan),
        "training": asdict(plan.campaign) if plan.campaign else None,
        "notes": plan.notes,
    }


def record(found: Estimate, best: Estimate) -> dict[str, Any]:
    """One layout as JSON."""
    low, high = found.between()
    return {
        "layout": str(found.layout),
        "step_seconds": found.step_seconds,
        "step_seconds_80": [low, high],
        "mfu": found.mfu,
        "hfu": found.hfu,
        "convention": found.convention,
        "tokens_per_second": found.tokens_per_second,
        "peak_bytes": found.peak_bytes,
        "fits": found.fits,
        "bubble": found.bubble,
        "terms": {term.name: term.seconds for term in found.step.children},
        "reasons": reasons(found, best),
    }


def _book(plan: Plan) -> dict[str, Any]:
    if isinstance(plan.book, str):
        return {"refused": plan.book}
    slower = {d.name: d.seconds for d in differences(plan.book, plan.best)}
    near = plan.book.step_seconds <= plan.found.bar
    rank = plan.found.rank(plan.book) if near else None
    return {"rank": rank, **record(plan.book, plan.best), "differences": slower}


def _why(plan: Plan) -> dict[str, Any] | None:
    asked = plan.why
    if asked is None:
        return None
    price = {} if asked.estimate is None else record(asked.estimate, plan.best)
    if asked.estimate is not None:
        apart = differences(asked.estimate, plan.best)
        price["differences"] = {d.name: d.seconds for d in apart}
    fix = None
    if asked.fix is not None:
        fix = {"changes": asked.fix.changes, **record(asked.fix.estimate, plan.best)}
    return {
        "asked": asked.asked,
        "rank": asked.rank or None,
        "refused": asked.refusal or None,
        **price,
        "fix": fix,
    }


def table_row(ranked: Ranked, best: Estimate) -> Sequence[str]:
    """One layout as a row of `HEADERS`."""
    found = ranked.estimate
    return (
        str(ranked.rank),
        str(found.layout),
        f"{found.step_seconds:.6g}",
        f"{found.mfu:.4f}",
        f"{found.hfu:.4f}",
        f"{found.tokens_per_second:.6g}",
        f"{found.peak_bytes:.0f}",
        f"{found.bubble:.4f}",
        "; ".join(reasons(found, best)),
    )
