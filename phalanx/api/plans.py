"""A search over layouts as a result: the ranking, the reasons, a whole training, and a run."""

import time
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Unpack

from phalanx.api.names import ClusterLike, ModelLike, is_of_catalog
from phalanx.api.requests import Options, request_of, trainable_limits
from phalanx.api.whole_training import training_record, whole_training
from phalanx.core.errors import RefusedError
from phalanx.core.estimate import Estimate
from phalanx.core.html import html_table
from phalanx.core.layout import Layout
from phalanx.core.run import Recipe, Run
from phalanx.core.units import show_bytes, show_share
from phalanx.cost.refusals import refuse
from phalanx.planner.diagnosis import Diagnosis, diagnose, nothing_fits
from phalanx.planner.explain import differences, why_not_faster, why_slower
from phalanx.planner.goodput import Campaign, Conditions
from phalanx.planner.heuristic import procedure
from phalanx.planner.parse import both
from phalanx.planner.refine import SEARCHED_KEYS
from phalanx.planner.rerank import Ranked
from phalanx.planner.search import Found, search
from phalanx.planner.sweep import Request

SCHEMA = 1


@dataclass(frozen=True)
class Plan:
    """The fastest layouts of a model on a cluster, and why they are.

    Attributes:
        found: what the search found.
        seconds: how long it took.
        heuristic: the layout of the textbook's procedure, or why it has none.
        reasoned: about the layout that was asked for, if one was.
        training: a whole training with the best layout, if tokens for it were given.
        notes: what a reader should know.
        cluster: the devices, as they were asked for; a run file names them so.
        binary: print GiB, not GB.

    Example:
        >>> import phalanx
        >>> plan = phalanx.plan("llama-3.1-8b", "h100x64", tokens="1Mi", seq=8192)
        >>> plan.best.fits, len(plan.layouts) <= 10
        (True, True)
    """

    found: Found
    seconds: float
    heuristic: Estimate | str
    reasoned: Diagnosis | None = None
    training: Campaign | None = None
    notes: tuple[str, ...] = ()
    cluster: str = ""
    binary: bool = False

    @property
    def request(self) -> Request:
        """What was searched for."""
        return self.found.request

    @property
    def layouts(self) -> tuple[Estimate, ...]:
        """The best layout of each mesh, fastest first, with its estimate."""
        return tuple(ranked.estimate for ranked in self.found.ranked)

    @property
    def best(self) -> Estimate:
        """The fastest layout."""
        return self.found.ranked[0].estimate

    def asking(self, layout: str) -> "Plan":
        """The same plan, with why it does not propose a layout.

        Args:
            layout: a whole line, or some keys, which stand for the fastest that has them.

        Raises:
            UsageError: an unknown key, or a value of the wrong kind.

        Example:
            >>> import phalanx
            >>> plan = phalanx.plan("llama-3.1-8b", "h100x64", tokens="1Mi", seq=8192)
            >>> plan.asking("tp=8").reasoned.estimate.step_seconds > plan.best.step_seconds
            True
        """
        return replace(self, reasoned=diagnose(self.found, layout, binary=self.binary))

    def for_training(self, tokens: str | float, conditions: Conditions | None = None) -> "Plan":
        """The same plan, with how long a whole training takes and what it costs.

        Args:
            tokens: to train on: a number, or a text such as 15T.
            conditions: what is assumed about failures, storage and prices.

        Raises:
            UsageError: no tokens, or failures so frequent that training never advances.
        """
        found = whole_training(self.request.shape, self.best, tokens, conditions)
        return replace(self, training=found)

    def to_run(self) -> Run:
        """The fastest layout that `phalanx train` runs, as a run.

        Raises:
            RefusedError: the trainer runs no layout of this model.
        """
        run = self._first_trainable(self.found)
        if run is None:
            limits = both(self.request.limits, trainable_limits(self.request))
            run = self._first_trainable(search(replace(self.request, limits=limits, top=1)))
        if run is None:
            raise RefusedError(self._why_untrainable())
        return run

    def only_trainable(self) -> "Plan":
        """Without the layouts that the trainer does not run.

        Raises:
            RefusedError: none is left; with the reason that refuses the fastest.
        """
        ranked = tuple(r for r in self.found.ranked if self._as_run(r) is not None)
        if not ranked:
            raise RefusedError(f"{self._why_untrainable()}; leave out trainable to plan only")
        return replace(self, found=replace(self.found, ranked=ranked))

    def _first_trainable(self, found: Found) -> Run | None:
        runs = (self._as_run(ranked) for ranked in found.ranked)
        return next((run for run in runs if run is not None), None)

    def _as_run(self, ranked: Ranked) -> Run | None:
        """The layout as a run, if `phalanx train` runs it."""
        run = self._run(ranked.estimate.layout)
        try:
            refuse(run)
        except RefusedError:
            return None
        return run

    def _run(self, layout: Layout) -> Run:
        request = self.request
        recipe = Recipe(seq=request.seq, batch=request.batch)
        shape = request.shape
        if not is_of_catalog(shape):
            shape = replace(shape, name="custom")
        if self.training is not None:
            every = max(round(self.training.interval / self.best.step_seconds), 1)
            steps = ceil(self.training.tokens / request.tokens)
            recipe = replace(recipe, steps=steps, checkpoint_every=every)
        return Run(model=request.shape, layout=layout, recipe=recipe, cluster=request.cluster.name)

    def _why_untrainable(self) -> str:
        """Why the trainer does not run the model at all, or the best layout."""
        simple = Layout(precision=self.request.precision)
        for layout in (simple, self.best.layout):
            try:
                refuse(self._run(layout))
            except RefusedError as refusal:
                return str(refusal)
        return "the trainer runs no layout that fits"

    def reasons(self, found: Estimate) -> tuple[str, ...]:
        """Why a layout is slower than the best; of the best, what it spends most on."""
        return why_not_faster(found) if found is self.best else why_slower(found, self.best)

    def to_dict(self) -> dict[str, Any]:
        """The document that `phalanx plan --json` prints."""
        found, request = self.found, self.request
        return {
            "schema": SCHEMA,
            "model": request.shape.name,
            "cluster": request.cluster.name,
            "framework": request.framework.name,
            "devices": request.cluster.count,
            "capacity_bytes": request.capacity,
            "seq": request.seq,
            "batch": request.batch,
            "tokens": request.tokens,
            "candidates": found.considered,
            "feasible": found.feasible,
            "seconds": self.seconds,
            "searched": list(SEARCHED_KEYS),
            "refused": dict(found.refused),
            "layouts": [
                {
                    "rank": ranked.rank,
                    **self._record(ranked.estimate),
                    "alike": [str(layout) for layout in ranked.alike],
                }
                for ranked in found.ranked
            ],
            "plain": None
            if found.plain is None
            else {"rank": found.plain.rank, **self._apart(found.plain.estimate)},
            "heuristic": self._heuristic_record(),
            "why": self._why_record(),
            "training": None if self.training is None else training_record(self.training),
            "notes": list(self.notes),
        }

    def _record(self, found: Estimate) -> dict[str, Any]:
        return {
            "layout": str(found.layout),
            "step_seconds": found.step_seconds,
            "step_seconds_80": list(found.between()),
            "spread_reason": found.spread_reason,
            "mfu": found.mfu,
            "hfu": found.hfu,
            "convention": found.convention,
            "tokens_per_second": found.tokens_per_second,
            "peak_bytes": found.peak_bytes,
            "fits": found.fits,
            "bubble": found.bubble,
            "term_seconds": {term.name: term.seconds for term in found.step.children},
            "reasons": list(self.reasons(found)),
        }

    def _apart(self, found: Estimate) -> dict[str, Any]:
        """A layout beside the best."""
        apart = differences(found, self.best)
        return {**self._record(found), "difference_seconds": {d.name: d.seconds for d in apart}}

    def _heuristic_record(self) -> dict[str, Any]:
        if isinstance(self.heuristic, str):
            return {"refused": self.heuristic}
        near = self.heuristic.step_seconds <= self.found.bar
        rank = self.found.rank(self.heuristic) if near else None
        return {"rank": rank, **self._apart(self.heuristic)}

    def _why_record(self) -> dict[str, Any] | None:
        asked = self.reasoned
        if asked is None:
            return None
        suggested = None
        if asked.fix is not None:
            suggested = {"changes": asked.fix.changes, **self._record(asked.fix.estimate)}
        return {
            "request": asked.asked,
            "rank": asked.rank or None,
            "refused": asked.refusal or None,
            **({} if asked.estimate is None else self._apart(asked.estimate)),
            "suggested": suggested,
        }

    def _repr_html_(self) -> str:
        """The ranking as a table, for a notebook."""
        request = self.request
        title = (
            f"{request.shape.name} on {request.cluster.name}: {self.found.feasible:,} of "
            f"{self.found.considered:,} layouts fit"
        )
        rows = [
            (
                ranked.rank,
                ranked.estimate.layout,
                f"{ranked.estimate.step_seconds:.3f}",
                show_share(ranked.estimate.mfu),
                show_bytes(ranked.estimate.peak_bytes, binary=self.binary),
                "; ".join(self.reasons(ranked.estimate)),
            )
            for ranked in self.found.ranked
        ]
        return html_table(title, rows, ("rank", "layout", "s/step", "MFU", "memory", "why"))


def plan(
    model: ModelLike,
    cluster: ClusterLike,
    *,
    tokens: str | float | None = None,
    batch: int | None = None,
    seq: int = 8192,
    **options: Unpack[Options],
) -> Plan:
    """Find the fastest layouts of a model on a cluster.

    Args:
        model: a catalog name, a `.toml` file, a table of sizes or a `ModelShape`.
        cluster: `h100x64`, a catalog name, a `.toml` file or a `Cluster`.
        tokens: in one step, all devices together: a number, or a text such as 16M; this or batch.
        batch: sequences in one step, all devices together.
        seq: tokens per sequence.
        options: fixed, max_tp, memory, framework, trainable, top; see `Options`.

    Returns:
        The ranking, with reasons and the textbook's layout beside it.

    Raises:
        UsageError: a name that nobody knows, or a number that cannot be.
        RefusedError: no layout fits; the message says by how much, and what would.

    Example:
        >>> import phalanx
        >>> plan = phalanx.plan("llama-3.1-8b", "h100x64", batch=128, seq=8192, fixed="tp=2")
        >>> plan.best.layout.tp
        2
    """
    started = time.perf_counter()
    request, notes = request_of(model, cluster, tokens, batch, seq, options)
    binary = "i" in str(options.get("memory", ""))
    found = search(request)
    if not found.ranked:
        raise RefusedError(nothing_fits(request, binary=binary))
    seconds = time.perf_counter() - started
    result = Plan(
        found,
        seconds,
        _heuristic(request),
        notes=notes,
        cluster=cluster if isinstance(cluster, str) else request.cluster.name,
        binary=binary,
    )
    return result.only_trainable() if options.get("trainable", False) else result


def _heuristic(request: Request) -> Estimate | str:
    try:
        return procedure(request)
    except RefusedError as refusal:
        return str(refusal)
