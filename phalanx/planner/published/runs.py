"""Predicts published runs, and says how far off the predictions are.

Nothing here looks at a row's id, source or measured value before its prediction is made.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.catalog.evidence import evidence
from phalanx.core.errors import RefusedError, UsageError
from phalanx.core.estimate import SIGMAS_OF_80_PERCENT, Estimate
from phalanx.core.layout import Layout
from phalanx.core.recompute import MODES
from phalanx.cost.flops import flops_per_token, recompute_flops_per_token
from phalanx.planner.estimate import Priced
from phalanx.planner.published.cells import Row, UnusableError
from phalanx.planner.published.rows import PublishedRun, read_run
from phalanx.planner.uncertainty import uncertainty
from phalanx.planner.workload import Workload, formula_mode, workload_of

LEDGER_EXCESS = 7 / 6
_SOURCE_ENDS = re.compile(r"[@(]| Table| \xa7")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What was predicted for one row, beside what was published.

    Attributes:
        id: of the row.
        source: where the row comes from, in a few words.
        model: its name.
        devices: how many.
        skipped: why nothing was predicted; empty if something was.
        complete: the row names its layout completely.
        seconds, baseline_seconds: of a step: ours, and at constant utilisation.
        published_seconds: as published.
        peak_bytes, published_peak_bytes: of the worst rank, by the meaning of the source.
        fits: whether ours fits into the device.
        spread, spread_reason: see `Estimate.spread`; more where the row leaves its layout open.
        layout: the one that was priced.
        assumptions: what the row left open.
    """

    id: str
    source: str = ""
    model: str = ""
    devices: int = 0
    skipped: str = ""
    complete: bool = False
    seconds: float | None = None
    baseline_seconds: float | None = None
    published_seconds: float | None = None
    peak_bytes: float | None = None
    published_peak_bytes: float | None = None
    fits: bool = True
    spread: float = 0.0
    spread_reason: str = ""
    layout: str = ""
    assumptions: tuple[str, ...] = ()

    @property
    def interval(self) -> tuple[float, float] | None:
        """Seconds between which the step should lie in 80 % of all cases, by the residuals."""
        if self.seconds is None:
            return None
        factor = math.exp(SIGMAS_OF_80_PERCENT * self.spread)
        return self.seconds / factor, self.seconds * factor

    @property
    def time_error(self) -> float | None:
        """(predicted - published) / published seconds."""
        return _error(self.seconds, self.published_seconds)

    @property
    def baseline_error(self) -> float | None:
        """The same for the baseline."""
        return _error(self.baseline_seconds, self.published_seconds)

    @property
    def memory_error(self) -> float | None:
        """(predicted - published) / published bytes."""
        return _error(self.peak_bytes, self.published_peak_bytes)


def _error(predicted: float | None, published: float | None) -> float | None:
    if predicted is None or published is None:
        return None
    return predicted / published - 1


def predict(row: Row) -> Prediction:
    """Predict one row; what cannot be predicted says why, in `skipped`.

    Args:
        row: cells by column, of a file that `read_rows` accepts.
    """
    try:
        run = read_run(row)
        found = _one_layer(run) if run.one_layer else _whole_step(run)
    except (UnusableError, RefusedError, UsageError) as reason:
        found = Prediction(id=row.get("id", ""), skipped=str(reason))
    source = _SOURCE_ENDS.split(row.get("source", ""), maxsplit=1)[0].strip()
    return replace(found, source=source, model=row.get("model", ""))


def predict_all(rows: Iterable[Row]) -> list[Prediction]:
    """Predict every row."""
    return [predict(row) for row in rows]


def _priced(run: PublishedRun, index: int) -> Priced:
    layout = run.layouts[index]
    return Priced(*workload_of(run.shape, run.cluster, layout, run.seq, run.batch, run.framework))


def chosen(run: PublishedRun) -> Priced:
    """The layout of a run that is predicted, with its workload.

    Args:
        run: a row as values.

    Raises:
        RefusedError: none of its layouts can be priced.
    """
    if run.one_layer or len(run.layouts) == 1:
        return _priced(run, 0)
    workload, found = _choose(run)
    return Priced(workload, found.layout)


def _one_layer(run: PublishedRun) -> Prediction:
    priced = _priced(run, 0)
    doubt = uncertainty(priced.workload, priced.layout)
    return Prediction(
        id=run.id,
        devices=run.cluster.count,
        complete=run.complete,
        seconds=priced.block_seconds(),
        baseline_seconds=None,
        published_seconds=run.step_seconds,
        spread=_spread(run, doubt.spread),
        spread_reason=doubt.reason,
        layout=str(priced.layout),
        assumptions=(*run.assumptions, "forward and backward of one block"),
    )


def _whole_step(run: PublishedRun) -> Prediction:
    workload, found = _choose(run)
    spare = 0.0 if run.allocated else workload.framework.stack.fragmentation
    return Prediction(
        id=run.id,
        devices=run.cluster.count,
        complete=run.complete,
        seconds=found.step_seconds,
        baseline_seconds=baseline(workload, found.layout),
        published_seconds=run.step_seconds,
        peak_bytes=max(rank.allocated for rank in found.ranks) * (1 + spare),
        published_peak_bytes=run.peak_bytes,
        fits=found.fits,
        spread=_spread(run, found.spread),
        spread_reason=found.spread_reason,
        layout=str(found.layout),
        assumptions=run.assumptions,
    )


def _spread(run: PublishedRun, spread: float) -> float:
    """More where the row leaves its layout open."""
    return spread if run.complete else math.hypot(spread, evidence().open)


def _choose(run: PublishedRun) -> tuple[Workload, Estimate]:
    """The fastest of the layouts left open that fit with the least recomputation.

    Programs of others keep less than the ledger says, by up to a sixth in runs of the fit that are
    known to have been done; so what a row leaves open is not refused for so much.
    """
    found = []
    reason: Exception = UnusableError("no layout")
    for index in range(len(run.layouts)):
        try:
            priced = _priced(run, index)
            found.append((priced.workload, priced.estimate()))
        except RefusedError as refusal:
            reason = refusal
    if not found:
        raise reason
    fitting = [pair for pair in found if _may_fit(pair[1])] or found[-1:]
    modes = {estimate.layout.recompute for _, estimate in fitting}
    least = min(modes, key=lambda mode: MODES.index(mode) if mode in MODES else -1)
    candidates = [pair for pair in fitting if pair[1].layout.recompute == least]
    return min(candidates, key=lambda pair: pair[1].step_seconds)


def _may_fit(found: Estimate) -> bool:
    most = max(rank.allocated for rank in found.ranks)
    return most <= LEDGER_EXCESS * found.capacity


def baseline(workload: Workload, layout: Layout) -> float:
    """Seconds at constant utilisation: executed FLOP at one share of the peak per accelerator.

    Args:
        workload: of it model, sequence, batch, and the device's peak and share.
        layout: of it the ranks and recomputation.
    """
    shape, seq = workload.shape, workload.seq
    flops = flops_per_token(shape, seq, causal=False) + recompute_flops_per_token(
        shape, seq, formula_mode(layout.recompute), causal=False
    )
    reached = workload.rates.utilization * workload.machine.peak * layout.ranks
    return workload.tokens * flops / reached
